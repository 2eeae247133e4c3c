"""Changes one line of the product at random, runs the tests of its package, and lists the changes that no test saw.

    python scripts/mutants.py --per-package 3 --seed 0
    python scripts/mutants.py --packages optimizers gradients --per-package 10

Each change is made in a copy of the checkout, so the working tree stays as it is. A survivor is a place to look at: the
change may be harmless, or seen only by the slow tests (--full runs these, too).
"""

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Folders of packages, within the package.
WINGS = ("ground", "training", "monitors")

_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}


@dataclass(frozen=True)
class Mutant:
    """One changed piece of one line."""

    path: Path
    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


def mutants_of(path: Path) -> list[Mutant]:
    """All changes that are made to a file: comparisons, conditions, arithmetic, constants, and calls left out."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    found = []
    for node in ast.walk(ast.parse(text)):
        for start, end, new in _changes(node, text, lines):
            changed = text[:start] + new + text[end:]
            line = text.count("\n", 0, start) + 1
            found.append(Mutant(path, line, lines[line - 1], changed.splitlines()[line - 1], changed))
    return found


def _changes(node: ast.AST, text: str, lines: list[str]) -> Iterator[tuple[int, int, str]]:
    def offset(line: int, column: int) -> int:
        before = "".join(lines[: line - 1])
        return len(before) + len(lines[line - 1].encode()[:column].decode())

    def span(part: ast.expr | ast.stmt) -> tuple[int, int]:
        assert part.end_lineno is not None
        assert part.end_col_offset is not None
        return offset(part.lineno, part.col_offset), offset(part.end_lineno, part.end_col_offset)

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARISONS:
            yield span(left)[1], span(right)[0], f" {_COMPARISONS[type(operator)]} "
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            between = text[span(left)[1] : span(right)[0]]
            if between.strip() in "+-*/":
                yield span(left)[1], span(right)[0], f" {_ARITHMETIC[type(operator)]} "
        case ast.BoolOp(op=operator, values=[first, second, *_]):
            start, end = span(first)[1], span(second)[0]
            word, other = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
            yield start, end, text[start:end].replace(word, other, 1)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield span(node)[0], span(operand)[0], ""
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            start, end = span(test)
            yield start, end, f"not ({text[start:end]})"
        case ast.Constant(value=bool(value)):
            yield *span(node), str(not value)
        case ast.Constant(value=int(value)):
            yield *span(node), str(value + 1)
        case ast.Expr(value=ast.Call()):
            yield *span(node), "pass"


def files_of(package: str) -> list[Path]:
    """The modules of a package; callbacks and strategies are at the top of the repository."""
    folders = [ROOT / package] if package in ("callbacks", "strategies") else []
    folders += [ROOT / "lightning_mp" / wing / package for wing in ("", *WINGS)]
    return sorted({path.resolve() for folder in folders for path in folder.rglob("*.py") if path.name != "__init__.py"})


def packages() -> list[str]:
    """All that have tests of their own."""
    inside = {folder.name for wing in ("", *WINGS) for folder in (ROOT / "lightning_mp" / wing).iterdir()}
    return sorted(name for name in inside if (ROOT / "tests" / name).is_dir() and files_of(name))


def survives(mutant: Mutant, package: str, copy: Path, *, full: bool, seconds: int) -> bool:
    """Whether the package's tests pass with the change; a run that takes too long has seen it."""
    changed = copy / mutant.path.relative_to(ROOT)
    changed.write_text(mutant.text)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{package}"]
    command += ["tests/refusals"]  # the argument checks of all packages
    command += [str(mutant.path.relative_to(ROOT))]  # its doctests
    if not full:
        command += ["-m", "not full"]
    try:
        run = subprocess.run(command, cwd=copy, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.copyfile(mutant.path, changed)
    return run.returncode == 0


def main() -> int:
    """Prints survivors; the exit code is 0 whether there are any or not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="*", default=packages(), metavar="NAME")
    parser.add_argument("--per-package", type=int, default=3, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=900, help="for the tests of one change")
    parser.add_argument("--full", action="store_true", help="run the slow tests, too")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.packages) - set(packages()))
    if unknown:
        parser.error(f"{', '.join(unknown)}: no package with tests. There are {', '.join(packages())}.")
    pick = random.Random(arguments.seed)
    survivors, tried = [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "runs"))
        for package in arguments.packages:
            candidates = [mutant for path in files_of(package) for mutant in mutants_of(path)]
            for mutant in pick.sample(candidates, min(arguments.per_package, len(candidates))):
                tried += 1
                alive = survives(mutant, package, copy, full=arguments.full, seconds=arguments.seconds)
                print(f"{'SURVIVED' if alive else 'seen    '}  {mutant}", flush=True)
                survivors += [mutant] if alive else []
    print(f"\n{tried} changes, {len(survivors)} not seen")
    return 0


if __name__ == "__main__":
    sys.exit(main())
