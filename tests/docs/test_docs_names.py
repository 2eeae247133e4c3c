"""What the pages name exists: parts, arguments, messages, headings; and no setting of another tool is missing."""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch import Trainer
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

import lightning_mp
from lightning_mp.__main__ import _COMMANDS
from lightning_mp.monitors.diagnostics.audit.findings import FindingKind
from lightning_mp.monitors.diagnostics.overflow.search import Verdict
from lightning_mp.monitors.preflight_checks.report import FindingName

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
HOMES = (
    lightning_mp,
    lightning_mp.checkpoints,
    lightning_mp.diagnostics,
    lightning_mp.metrics,
    lightning_mp.pipelining,
    lightning_mp.planning,
)
PUBLIC = {name: getattr(home, name) for home in HOMES for name in home.__all__}
SOURCE = "\n".join(
    path.read_text() for room in ("lightning_mp", "callbacks", "strategies") for path in (ROOT / room).rglob("*.py")
)
CLASSES = set(re.findall(r"^class ([A-Z]\w+)", SOURCE, re.MULTILINE))
# Parts of one message stand one below the other.
MESSAGES = re.sub(r'"\s*\n\s*f?"', "", SOURCE)


def pieces(page: Path) -> list[str]:
    """Python blocks and inline code."""
    text = page.read_text()
    inline = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return [
        *(code for language, code in FENCE.findall(text) if language == "python"),
        *(" ".join(code.replace("\\|", "|").split()) for code in inline),
    ]


def calls(code: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        # A pattern of a call, as `Name("a" | "b")`, parses; what does not must not hold a call of ours.
        assert not re.search(rf"\b({'|'.join(PUBLIC)})\([^)]", code), f"this is no Python: {code}"
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def target(function: ast.expr, known: dict[str, Any]) -> Any:
    """What is called: a name of ours, or a method of one; None for everything else."""
    match function:
        case ast.Name(name):
            assert name in known or name not in CLASSES, f"{name} is not public"
            return known.get(name)
        case ast.Attribute(ast.Name(owner), name) if inspect.isclass(known.get(owner)):
            return getattr(known[owner], name)
        case ast.Attribute() if ast.unparse(function).startswith("lightning_mp."):
            return pkgutil.resolve_name(ast.unparse(function))
    return None


def imported(code: str) -> dict[str, Any]:
    names = re.findall(r"^from (lightning_mp[\w.]*) import (.+)$", code, re.MULTILINE)
    return {name: pkgutil.resolve_name(f"{home}:{name}") for home, listed in names for name in listed.split(", ")}


def wrong_calls(page: Path) -> tuple[int, list[str]]:
    known, number, wrong = PUBLIC | imported(page.read_text()), 0, []
    defined = set(re.findall(r"^class (\w+)", page.read_text(), re.MULTILINE))
    for code in pieces(page):
        for call in calls(code):
            if isinstance(call.func, ast.Name) and call.func.id in defined:
                continue
            try:
                called = target(call.func, known)
                if called is None:
                    continue
                number += 1
                given = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
                inspect.signature(called).bind_partial(*call.args, **given)
            except (AssertionError, AttributeError, ImportError, TypeError) as error:
                wrong.append(f"{page.name}: {ast.unparse(call)}: {error}")
    return number, wrong


def test_every_part_and_argument_on_a_page_exists() -> None:
    found = [wrong_calls(page) for page in PAGES]
    assert [line for _, wrong in found for line in wrong] == []
    assert sum(number for number, _ in found) > 200


def test_every_dotted_name_on_a_page_exists() -> None:
    names = {code for page in PAGES for code in pieces(page) if re.fullmatch(r"lightning_mp(\.\w+)+", code)}
    assert len(names) > 5
    for name in names:
        pkgutil.resolve_name(name)


def test_messages_are_quoted_as_they_are_printed() -> None:
    """In docs/troubleshooting.md `...` stands for what the run fills in."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    lines = [line.strip() for language, code in FENCE.findall(page) if language == "text" for line in code.splitlines()]
    quoted = [part.strip() for line in lines for part in line.split("...") if len(part.strip()) > 3]
    assert len(quoted) > 25
    assert [part for part in quoted if part not in MESSAGES] == []
    verdicts = [part for part in re.findall(r'"([a-z][^"`]+)"', FENCE.sub("", page).replace("\n", " ")) if " " in part]
    assert len(verdicts) > 8
    assert [part for part in verdicts if re.sub(r"\s+", " ", part).partition(" float16")[0] not in MESSAGES] == []


def settings(annotation: Any) -> Iterator[str]:
    """The strings and numbers that a type allows."""
    for part in get_args(annotation):
        yield from (f'`"{part}"`',) if isinstance(part, str) else (f"`{part}`",) if isinstance(part, int) else ()
        yield from settings(part)


def test_every_setting_of_torch_and_lightning_has_a_row() -> None:
    page = (ROOT / "docs" / "coming_from.md").read_text()
    precisions = {*settings(inspect.signature(Trainer).parameters["precision"].annotation)}
    assert len(precisions) > 12
    of_torch = {
        *inspect.signature(torch.amp.autocast).parameters,
        *inspect.signature(torch.amp.GradScaler).parameters,
        *(field.name for kind in (MixedPrecision, MixedPrecisionPolicy) for field in fields(kind)),
    }
    cells = " ".join(line.split(" | ")[0] for line in page.splitlines() if line.startswith("|"))
    assert [setting for setting in sorted(precisions) if setting not in cells] == []
    assert [name for name in sorted(of_torch) if not re.search(rf"\b{name}\b", cells)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_lead_to_a_heading_or_an_anchor(page: Path) -> None:
    for file, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", page.read_text()):
        linked = page.parent / file if file else page
        headings = re.findall(r"^#+ (.+)$", FENCE.sub("", linked.read_text()), re.MULTILINE)
        anchors = set(re.findall(r'<a id="(\w+)">', linked.read_text()))
        assert anchor in anchors | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def hand_written(pages: list[Path]) -> str:
    return "\n".join(page.read_text() for page in pages if page.name != "api.md")


def test_every_public_name_is_on_a_page() -> None:
    """Promise: what is built can be found. The list of the API alone does not count."""
    words = set(re.findall(r"\w+", hand_written(PAGES)))
    assert [name for name in PUBLIC if not name.startswith("_") and name not in words] == []


def test_every_public_name_is_in_the_api() -> None:
    listed = re.findall(r"^   (\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    modules = {name for name in PUBLIC if inspect.ismodule(PUBLIC[name])}
    assert sorted(listed) == sorted({name for name in PUBLIC if not name.startswith("_")} - modules)


def test_every_setting_is_described() -> None:
    """On a page, or in the docstring (among its `Args:`, or below a field), which is the page of the API."""
    used = set(re.findall(r"(\w+)=", hand_written(PAGES)))
    missing = {}
    for name, value in PUBLIC.items():
        if not callable(value) or (inspect.isclass(value) and name not in lightning_mp.__all__):
            continue  # a class one level down is what a function returns
        described = {*used, *re.findall(r"^ *\**(\w+): ", inspect.getdoc(value) or "", re.MULTILINE)}
        missing[name] = sorted(set(inspect.signature(value).parameters) - {"args", "kwargs"} - described)
    assert len(missing) > 40
    assert {name: settings for name, settings in missing.items() if settings} == {}


def test_every_command_is_on_a_page() -> None:
    text = hand_written(PAGES)
    commands = list(_COMMANDS)
    assert len(commands) > 7
    assert [command for command in commands if f"lightning-mp {command}" not in text] == []


def test_every_kind_of_verdict_and_finding_is_on_a_page() -> None:
    text = hand_written(PAGES)
    kinds = {*get_args(FindingKind), *get_args(FindingName), *get_args(Verdict)}
    assert len(kinds) > 30
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in text] == []


def test_every_logged_name_is_on_its_page() -> None:
    logged = set(re.findall(r"\bmp/[a-z_]+(?![\w{/])", SOURCE))
    assert len(logged) > 15
    page = (ROOT / "docs" / "logged_names.md").read_text()
    assert [name for name in sorted(logged) if f"`{name}`" not in page] == []
