"""Figures in the README and the docs that come from files in docs/results, so that they cannot drift.

A page holds ``<!-- figure: NAME -->TEXT<!-- end -->``; the text is read from the results::

    python scripts/figures.py           # writes the figures of all pages anew
    python scripts/figures.py --check   # exit code 1 where one differs; `make docs` and `make results-check` do this
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
_MARKED = re.compile(r"<!-- figure: (?P<name>[\w.-]+) -->(?P<text>.*?)<!-- end -->")
#: Parts of the quality page on a language model, or adapters of one, at the rate at which runs do not part by rounding.
_LANGUAGE = ("text", "adapters", "masters_of_24_bits")
_SIXTEEN_BIT = ("bf16-mixed", "bf16-masters", "bf16-remainder", "16-mixed")


def _quality(part: str) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = json.loads((RESULTS / f"quality_{part}.json").read_text())
    return facts


def _sixteen_bit() -> Iterator[Mapping[str, Any]]:
    for part in _LANGUAGE:
        precisions = _quality(part)["result"]["precisions"]
        yield from (precisions[name] for name in _SIXTEEN_BIT if name in precisions)


def _pairs() -> str:
    [pairs] = {_quality(part)["sizes"]["seeds"] for part in _LANGUAGE}
    return str(pairs)


def _machines() -> str:
    makers = (_quality(part)["machine"].replace("(R)", "").split()[:2] for part in _LANGUAGE)
    return " and ".join(dict.fromkeys(" ".join(maker).rstrip(",") for maker in makers))


def _memory_errors(strategies: tuple[str, ...]) -> str:
    cells = json.loads((RESULTS / "memory_estimates.json").read_text())["cells"]
    errors = [
        c["estimated_bytes"] / c["measured_bytes"] - 1
        for c in cells
        if c["strategy"] in strategies and "measured_bytes" in c
    ]
    return f"{min(errors):+.1%} to {max(errors):+.1%} in {len(errors)} cells"


FIGURES: Mapping[str, Callable[[], str]] = {
    "quality.pairs": _pairs,
    "quality.machines": _machines,
    "quality.mean": lambda: f"{max(found['mean_difference'] for found in _sixteen_bit()):+.4f}",
    "quality.upper": lambda: f"{max(found['interval'][1] for found in _sixteen_bit()):+.4f}",
    "memory.errors": lambda: _memory_errors(("single", "ddp", "ddp, views")),
    "memory.fsdp2-errors": lambda: _memory_errors(("fsdp2",)),
}


def filled(text: str) -> str:
    """The text with its figures read anew."""
    return _MARKED.sub(lambda m: f"<!-- figure: {m['name']} -->{FIGURES[m['name']]()}<!-- end -->", text)


def pages() -> list[Path]:
    """Pages that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def drifted() -> list[str]:
    """Pages whose figures are not those of the results."""
    return [str(page.relative_to(ROOT)) for page in pages() if filled(text := page.read_text()) != text]


def main() -> int:
    """Exit code 1 where a figure has drifted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        found = drifted()
        print(
            "\n".join(f"{page}: a figure is not that of docs/results. Run python scripts/figures.py" for page in found)
        )
        return int(bool(found))
    for page in pages():
        text = page.read_text()
        if filled(text) != text:
            page.write_text(filled(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
