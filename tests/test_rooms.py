"""The rooms of the package: imports go down only, and one file alone touches what others keep private."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From the ground up; a room imports from itself and from the rooms below. "" holds the single-file modules.
FLOORS = [{""}, {"precision"}, {"planning"}, {"metrics"}, {"callbacks", "strategies"}, {"demo"}, {"__main__"}]
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
OTHERS = {"lightning", "pytorch_lightning", "torch", "torchmetrics"}


def modules() -> dict[str, Path]:
    """Name and file of every module but the package's own front door, which imports all of them."""
    files = {file.relative_to(ROOT / "lightning_mp"): file for file in (ROOT / "lightning_mp").rglob("*.py")}
    for name in ("callbacks", "strategies"):
        files |= {file.relative_to(ROOT): file for file in (ROOT / name).rglob("*.py")}
    dotted = {".".join(["lightning_mp", *path.with_suffix("").parts]): file for path, file in files.items()}
    return {name.removesuffix(".__init__"): file for name, file in dotted.items() if name != "lightning_mp.__init__"}


MODULES = modules()


def room_of(module: str) -> str:
    first = module.split(".")[1] if "." in module else ""
    return first if first in FLOOR_OF else ""


def imports_of(file: Path) -> Iterator[str]:
    """Every name a file imports, in full, also inside functions and for type checking only."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write the import in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names_used(tree: ast.AST) -> Iterator[str]:
    """Every dotted name, as `torch.amp.GradScaler`."""
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(parts)])


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module):
    height = FLOOR_OF[room_of(module)]
    ours = {name for name in imports_of(MODULES[module]) if name.split(".")[0] == "lightning_mp"}
    upwards = {
        name
        for name in ours
        if FLOOR_OF[room_of(name)] > height or (FLOOR_OF[room_of(name)] == height and room_of(name) != room_of(module))
    }
    assert upwards == set()


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) not in ("demo", "__main__")])
def test_no_module_below_the_demo_imports_the_front_door(module):
    """`from lightning_mp import X` inside the package would run all of it, in an order nobody chose."""
    through_the_door = {
        name
        for name in imports_of(MODULES[module])
        if name.split(".")[0] == "lightning_mp" and name not in MODULES and name.rsplit(".", 1)[0] not in MODULES
    }
    assert through_the_door == set()


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) == "planning"])
def test_planning_needs_no_trainer(module):
    assert {name for name in imports_of(MODULES[module]) if name.split(".")[0] in OTHERS - {"torch"}} == set()


@pytest.mark.parametrize("module", [name for name in MODULES if name != "lightning_mp.seams"])
def test_only_the_seams_touch_private_names_of_lightning_and_torch(module):
    tree = ast.parse(MODULES[module].read_text())
    used = {*imports_of(MODULES[module]), *names_used(tree)}
    assert {name for name in used if name.split(".")[0] in OTHERS and is_private(name)} == set()
