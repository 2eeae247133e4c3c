"""What a run raises, warns of and logs: short, and in plain English."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("lightning_mp", "callbacks", "strategies") for path in (ROOT / folder).rglob("*.py"))
SAYS = {"rank_zero_info", "rank_zero_warn", "rank_zero_deprecation", "warn", "print"}
MOST_WORDS = 40
# Translated idioms. Of names and sentences beside messages only the clear ones.
IDIOMS = re.compile(
    r"\b(go(es|ing)? on( with)?|went on|at fault|(is|are) told|asks for|asked for|wants|stands? (in|at)|so many)\b"
)


def text_of(node: ast.AST) -> str:
    """A text as far as it is known: what is filled in by the run is one word."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(text_of(value) for value in node.values)
        case ast.FormattedValue():
            return "X"
        case ast.BinOp(op=ast.Add()):
            return text_of(node.left) + text_of(node.right)
        case ast.IfExp():
            return max(text_of(node.body), text_of(node.orelse), key=len)
    return ""


def messages(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if isinstance(node, ast.Raise) or name in SAYS or name.endswith(("Error", "Exception")):
            yield from ((call.lineno, text_of(argument)) for argument in call.args[:1])


@pytest.mark.parametrize("folder", ["callbacks", "strategies", "lightning_mp"])
def test_a_message_is_short_and_has_no_translated_idiom(folder: str) -> None:
    found = [
        (str(path.relative_to(ROOT)), line, text)
        for path in FILES
        if path.relative_to(ROOT).parts[0] == folder
        for line, text in messages(path)
    ]
    assert len(found) > 20
    assert not [(path, line) for path, line, text in found if len(text.split()) > MOST_WORDS]
    assert not [(path, line, text) for path, line, text in found if IDIOMS.search(text)]
