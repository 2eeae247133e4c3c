"""The subpackages of lightning_mp: imports go down only, and three files alone touch what others keep private."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROW_OF_A_PACKAGE = re.compile(r"^\| (\d+) \| `(\w+)` \|", re.MULTILINE)
# From the ground up; a package imports from itself and from the layers below. The page has the same list.
LAYERS = [
    {"_version", "core"},
    {"checkpoints", "modules"},
    {"flops", "gradients", "optimizers", "policy", "resume"},
    {
        "activation_checkpointing",
        "distributed",
        "metrics",
        "optimizer_step",
        "planning",
        "tokens",
    },
    {"accumulation", "cli", "diagnostics", "lr_schedule", "tensor_parallel"},
    {"pipelining", "precision", "preflight_checks"},
    {"callbacks", "comparison", "language_model", "strategies"},
    {"demo", "__main__"},
]
LAYER_OF = {package: height for height, packages in enumerate(LAYERS, start=1) for package in packages}
# The command line's front door names the demo's verb; nobody imports it.
BESIDES = {("__main__", "demo")}
OTHERS = {"lightning", "pytorch_lightning", "torch", "torchmetrics"}
PRIVATE = {f"lightning_mp.core.{name}" for name in ("private_api", "private_loop_api", "private_sharding_api")}
FRONT_DOOR = ("demo", "__main__")


def modules() -> dict[str, Path]:
    """Name and file of every module but the package's own front door, which imports all of them."""
    files = {file.relative_to(ROOT / "lightning_mp"): file for file in (ROOT / "lightning_mp").rglob("*.py")}
    for name in ("callbacks", "strategies"):
        files |= {file.relative_to(ROOT): file for file in (ROOT / name).rglob("*.py")}
    dotted = {".".join(["lightning_mp", *path.with_suffix("").parts]): file for path, file in files.items()}
    return {name.removesuffix(".__init__"): file for name, file in dotted.items() if name != "lightning_mp.__init__"}


MODULES = modules()
FOLDERS = {name.split(".")[1] for name in MODULES if len(name.split(".")) > 2}


def package_of(module: str) -> str:
    """The folder that a module lives in; what is imported from the front door is in none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYER_OF else ""


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
    assert {f for f in files if not any((ROOT / top / f).exists() for top in ("", "lightning_mp"))} == set()


def test_a_file_that_the_page_names_defines_the_name_beside_it():
    pairs = re.findall(r"`(\w+)(?:\.\w+\(\w*\))?`\s(?:\(|in )`((?:\w+/)+\w+\.py)`", PAGE)
    assert len(pairs) >= 6
    for name, file in pairs:
        assert re.search(rf"^(?:def|class) {name}\b", (ROOT / "lightning_mp" / file).read_text(), re.MULTILINE), name


def test_a_package_says_what_lives_there():
    said = {package: ast.get_docstring(nodes_of(f"lightning_mp.{package}")[0]) or "" for package in FOLDERS}
    assert {package for package, docstring in said.items() if len(docstring) <= 30} == set()


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


def test_planning_and_flops_need_no_trainer():
    counted = [module for module in MODULES if package_of(module) in ("flops", "planning")]
    found = {
        module: {name for name in imports_of(module) if name.split(".")[0] in OTHERS - {"torch"}} for module in counted
    }
    assert without_empty(found) == {}


def private_names_of_others(module: str) -> set[str]:
    used = {*imports_of(module), *names_used(module)}
    return {name for name in used if name.split(".")[0] in OTHERS and is_private(name)}


def test_only_three_files_touch_private_names_of_lightning_and_torch():
    found = {module: private_names_of_others(module) for module in MODULES if module not in PRIVATE}
    assert without_empty(found) == {}
