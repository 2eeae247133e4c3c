"""The subpackages of lightning_mp: imports go down only, and the seams alone touch what others keep private."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROW_OF_A_PACKAGE = re.compile(r"^\| (\d+) \| `(\w+)` \|", re.MULTILINE)
# From the ground up; a package imports from itself and from the layers below. The page has the same list.
LAYERS = [
    {"_version", "core"},
    {"checkpoints", "modules"},
    {"flops", "gradients", "optimizers", "policy", "resume"},
    {"activation_checkpointing", "distributed", "metrics", "optimizer_step", "step_memory", "tokens"},
    {"accumulation", "diagnostics", "lr_schedule", "planning", "tensor_parallel"},
    {"cli", "pipelining", "precision", "preflight_checks"},
    {"callbacks", "comparison", "language_model", "strategies"},
    {"demo", "__main__"},
]
LAYER_OF = {package: height for height, packages in enumerate(LAYERS, start=1) for package in packages}
# The command line's front door names the demo's verb; nobody imports it.
BESIDES = {("__main__", "demo")}
OTHERS = {"lightning", "pytorch_lightning", "torch", "torchmetrics", "typing_extensions"}
SEAMS = (ROOT / "lightning_mp" / "ground" / "core").glob("private_*_api.py")
PRIVATE = {f"lightning_mp.ground.core.{file.stem}" for file in SEAMS}
FRONT_DOOR = ("demo", "__main__")
# Wings with a folder of their own; planning and the pipeline are packages.
WINGS = ("ground", "training", "monitors")
# What each wing of the page may import from, beside itself.
MAY_IMPORT = {
    "Ground": set(),
    "Training": {"Ground"},
    "Monitors": {"Ground", "Training"},
    "Planning": {"Ground", "Monitors"},
    "Pipeline": {"Ground", "Training"},
    "Examples": {"Ground", "Training", "Monitors", "Planning", "Pipeline"},
}


def modules() -> dict[str, Path]:
    """Name and file of every module but the package's own front door, which imports all of them."""
    files = {file.relative_to(ROOT / "lightning_mp"): file for file in (ROOT / "lightning_mp").rglob("*.py")}
    for name in ("callbacks", "strategies"):
        files |= {file.relative_to(ROOT): file for file in (ROOT / name).rglob("*.py")}
    dotted = {".".join(["lightning_mp", *path.with_suffix("").parts]): file for path, file in files.items()}
    return {name.removesuffix(".__init__"): file for name, file in dotted.items() if name != "lightning_mp.__init__"}


MODULES = modules()


def path_of(module: str) -> list[str]:
    """The package and the names below it, without the wing."""
    parts = module.split(".")[1:]
    return parts[1:] if parts and parts[0] in WINGS else parts


FOLDERS = {path_of(name)[0] for name in MODULES if len(path_of(name)) > 1}


def package_of(module: str) -> str:
    """The folder that a module lives in; what is imported from the front door is in none."""
    path = path_of(module)
    return path[0] if path and path[0] in LAYER_OF else ""


@functools.cache
def nodes_of(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(MODULES[module].read_text())))


@functools.cache
def imports_of(module: str) -> frozenset[str]:
    """Every name a module imports, in full, also inside functions and for type checking only."""
    plain = [alias.name for node in nodes_of(module) if isinstance(node, ast.Import) for alias in node.names]
    froms = [node for node in nodes_of(module) if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 0 for node in froms), f"{module}: write the import in full"
    return frozenset(plain) | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def names_used(module: str) -> Iterator[str]:
    """Every dotted name, as `torch.amp.GradScaler`."""
    for node in nodes_of(module):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(parts)])


def without_empty(found: dict[str, set[str]]) -> dict[str, set[str]]:
    return {module: names for module, names in found.items() if names}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_every_folder_has_a_layer():
    assert FOLDERS - LAYER_OF.keys() == set(), "give the new folder a layer here and a row in docs/architecture.md"
    assert LAYER_OF.keys() - FOLDERS == {"_version", "__main__"}


def test_the_root_of_the_package_holds_folders_and_three_files():
    assert {file.name for file in (ROOT / "lightning_mp").glob("*.py")} == {"__init__.py", "__main__.py", "_version.py"}


def test_the_page_lists_every_package_on_its_layer():
    listed = {(package, int(layer)) for layer, package in ROW_OF_A_PACKAGE.findall(PAGE)}
    assert listed == {(package, layer) for package, layer in LAYER_OF.items() if not package.startswith("_")}


def test_every_file_that_the_page_names_exists():
    files = set(re.findall(r"\b((?:\w+/)+\w+\.py)\b", PAGE))
    assert len(files) > 15
    assert {file for file in files if not (ROOT / file).exists() and not places_of(file)} == set()


def places_of(file: str) -> list[Path]:
    """Where a file of the page is, which leaves the wing out."""
    return [path for wing in ("", *WINGS) if (path := ROOT / "lightning_mp" / wing / file).exists()]


def test_a_file_that_the_page_names_defines_the_name_beside_it():
    pairs = re.findall(r"`(\w+)(?:\.\w+\(\w*\))?`\s(?:\(|in )`((?:\w+/)+\w+\.py)`", PAGE)
    assert len(pairs) >= 6
    for name, file in pairs:
        (path,) = places_of(file)
        assert re.search(rf"^(?:def|class) {name}\b", path.read_text(), re.MULTILINE), name


def test_a_package_says_what_lives_there():
    packages = [name for name, file in MODULES.items() if file.name == "__init__.py"]
    assert len(packages) > len(FOLDERS)
    assert {name for name in packages if len(ast.get_docstring(nodes_of(name)[0]) or "") <= 30} == set()


def imports_that_do_not_go_down(module: str) -> set[str]:
    package = package_of(module)
    ours = {name for name in imports_of(module) if name.split(".")[0] == "lightning_mp"}
    elsewhere = {
        name for name in ours if package_of(name) not in ("", package) and (package, package_of(name)) not in BESIDES
    }
    return {name for name in elsewhere if LAYER_OF[package_of(name)] >= LAYER_OF[package]}


def test_imports_go_down_only():
    assert without_empty({module: imports_that_do_not_go_down(module) for module in MODULES}) == {}


def imports_through_the_front_door(module: str) -> set[str]:
    return {
        name
        for name in imports_of(module)
        if name.split(".")[0] == "lightning_mp" and name not in MODULES and name.rsplit(".", 1)[0] not in MODULES
    }


def test_no_module_below_the_demo_imports_the_front_door():
    """`from lightning_mp import X` inside the package would run all of it, in an order nobody chose."""
    below = [module for module in MODULES if package_of(module) not in FRONT_DOOR]
    assert without_empty({module: imports_through_the_front_door(module) for module in below}) == {}


def wings_of_packages() -> dict[str, str]:
    """The wing of each package, by the headings of the page."""
    packages = PAGE.split("## Packages and layers")[1].split("\n## ")[0]
    sections = re.split(r"^### (\w+)$", packages, flags=re.MULTILINE)[1:]
    return {
        package: wing
        for wing, text in zip(sections[::2], sections[1::2], strict=True)
        for _, package in ROW_OF_A_PACKAGE.findall(text)
    }


WING_OF = wings_of_packages()
CALLBACKS_OF_MONITORS = set(re.findall(r"`(\w+)\.py`", PAGE.split("the files of monitors (")[1].split(")")[0]))
STRATEGIES_OF_PIPELINE = {"pipeline", "pipeline_setup"}


def wing_of(module: str) -> str:
    """The wing of a module; none for the front doors of callbacks and strategies, which name all of theirs."""
    package, name = [*path_of(module), "", ""][:2]
    if package in ("callbacks", "strategies"):
        if not name:
            return ""
        monitors, pipeline = package == "callbacks" and name in CALLBACKS_OF_MONITORS, name in STRATEGIES_OF_PIPELINE
        return "Monitors" if monitors else "Pipeline" if pipeline else "Training"
    return WING_OF.get(package, "")


def modules_imported_by(module: str) -> set[str]:
    names = {name if name in MODULES else name.rsplit(".", 1)[0] for name in imports_of(module)}
    return names & MODULES.keys()


def test_every_package_is_in_one_wing():
    assert WING_OF.keys() == LAYER_OF.keys() - {"_version", "__main__"}
    assert set(WING_OF.values()) == MAY_IMPORT.keys()
    drawn = set(re.findall(r"\w+", (ROOT / "docs" / "drawings" / "wings.svg").read_text()))
    assert WING_OF.keys() - drawn == set()
    assert {f"lightning_mp.callbacks.{name}" for name in CALLBACKS_OF_MONITORS} <= MODULES.keys()


@pytest.mark.parametrize("wing", WINGS)
def test_the_folder_of_a_wing_holds_its_packages_and_no_other(wing):
    inside = {folder.name for folder in (ROOT / "lightning_mp" / wing).iterdir() if (folder / "__init__.py").exists()}
    linked = {"callbacks", "strategies"}
    assert inside == {package for package, its_wing in WING_OF.items() if its_wing == wing.title()} - linked


def imports_that_cross_the_wings(module: str) -> set[str]:
    wing = wing_of(module)
    allowed = MAY_IMPORT.get(wing, set()) | {wing, ""}
    return {name for name in modules_imported_by(module) if wing and wing_of(name) not in allowed}


def test_a_wing_imports_only_those_that_it_may():
    assert without_empty({module: imports_that_cross_the_wings(module) for module in MODULES}) == {}


def test_planning_and_flops_need_no_trainer():
    counted = [module for module in MODULES if package_of(module) in ("flops", "planning")]
    with_trainers = OTHERS - {"torch", "typing_extensions"}
    found = {module: {name for name in imports_of(module) if name.split(".")[0] in with_trainers} for module in counted}
    assert without_empty(found) == {}


def private_names_of_others(module: str) -> set[str]:
    used = {*imports_of(module), *names_used(module)}
    return {name for name in used if name.split(".")[0] in OTHERS and is_private(name)}


def test_only_the_seams_touch_private_names_of_lightning_and_torch():
    found = {module: private_names_of_others(module) for module in MODULES if module not in PRIVATE}
    assert without_empty(found) == {}


MEAN_LINES, MONITOR_LINES = 4_200, 4_250
PARTS = {
    name: module
    for module in MODULES
    if module.startswith(("lightning_mp.callbacks.", "lightning_mp.strategies."))
    and not (name := module.rsplit(".", 1)[1]).startswith("_")
}


@functools.cache
def lines_of(module: str) -> int:
    return len(MODULES[module].read_text().splitlines())


@functools.cache
def imported_at_once(module: str) -> frozenset[str]:
    """The modules of the package that an import of this one brings along; the front doors of packages count nothing."""
    found = set()
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= inner or {node.module}
    return frozenset(found)


def lines_to_own(modules: Iterable[str]) -> int:
    seen: set[str] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += imported_at_once(module)
    return sum(map(lines_of, seen))


def test_a_part_can_be_owned_without_the_rest():
    sizes = {name: lines_to_own([module]) for name, module in PARTS.items()}
    assert len(sizes) > 15
    assert sizes["rank_watchdog"] < 800
    assert sizes["fsdp2"] < 9_150
    assert sizes["chinchilla_budget"] < 7_350
    assert sum(sizes.values()) / len(sizes) < MEAN_LINES, sizes


@pytest.mark.parametrize("name", sorted(CALLBACKS_OF_MONITORS - {"_gradient_exponents"}))
def test_a_monitor_can_be_owned_without_training(name):
    assert lines_to_own([f"lightning_mp.callbacks.{name}"]) < MONITOR_LINES
