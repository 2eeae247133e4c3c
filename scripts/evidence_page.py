"""The page that scripts/evidence.py writes: verdicts, tables and pictures from its results."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_page(out: Path, page: Path, parts: Collection[str]) -> None:
    """Writes the page from the JSON file of each part in a folder; pictures and copies of these files beside it.

    Args:
        out: the folder.
        page: a Markdown file.
        parts: in the order of the page; those without a file have not run.
    """
    found = {part: json.loads(file.read_text()) for part in parts if (file := out / f"{part}.json").is_file()}
    lines = ["# Quality of each precision, in paired runs", ""]
    commits = ", ".join(dict.fromkeys(str(facts.get("commit", "unknown")) for facts in found.values()))
    lines += [
        f"Made by `python scripts/evidence.py` at commit `{commits}`; command, machine and versions of each part are"
        " below.",
        "",
        "Written by `scripts/evidence.py`. How to read it: [Compare precisions](../compare.md). All of it ran on a",
        "CPU, with fp8 emulated; nothing here has been measured on a GPU.",
        "",
        *verdict_table([facts for facts in found.values() if "result" in facts]),
    ]
    for part in parts:
        if part not in found:
            lines += ["", heading(part), "", f"Not run yet: `make evidence ARGS='--parts {part}'`."]
            continue
        lines += ["", *page_section(found[part], out, page)]
        beside(page, part, ".json").write_bytes((out / f"{part}.json").read_bytes())
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def verdict_table(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """Verdicts, mean differences and intervals in nats, a column per part."""
    if not measured:
        return []
    columns = [facts["result"] for facts in measured]
    lines = [
        f"Verdict, and loss minus that of {columns[0]['baseline']} in nats: mean, and its"
        f" {columns[0]['confidence']:.0%} interval. The margin is {columns[0]['margin']:g}.",
        "",
        "| precision | " + " | ".join(facts["part"] for facts in measured) + " |",
        "|---|" + "---|" * len(measured),
    ]
    names = dict.fromkeys(name for column in columns for name in list(column["precisions"])[1:])
    for name in names:
        found = [column["precisions"].get(name) for column in columns]
        cells = ["-" if each is None else verdict_cell(each) for each in found]
        lines += [f"| {name} | " + " | ".join(cells) + " |"]
    return lines


def verdict_cell(found: Mapping[str, Any]) -> str:
    """One precision in one part."""
    if found["mean_difference"] is None:
        return f"{found['verdict']}: runs diverged"
    low, high = ("?" if end is None else f"{end:+.4f}" for end in found["interval"])
    return f"{found['verdict']}: {found['mean_difference']:+.4f} ({low} to {high})"


def beside(page: Path, part: str, suffix: str) -> Path:
    """A file of one part in the page's folder."""
    return page.with_name(f"{page.stem}_{part}{suffix}")


def heading(part: str) -> str:
    """Its name as a title."""
    return f"## {part.replace('_', ' ').capitalize()}"


def page_section(facts: Mapping[str, Any], out: Path, page: Path) -> list[str]:
    """One part."""
    part = facts["part"]
    lines = [heading(part), "", facts["about"], ""]
    if "not_measured" in facts:
        return [*lines, f"{facts['not_measured'].capitalize()}."]
    result, sizes = facts["result"], facts["sizes"]
    if facts["limits"]:
        lines += [f"**{facts['limits']}**", ""]
    versions = ", ".join(f"{name} {number}" for name, number in {**facts["versions"], **result["versions"]}.items())
    lines += [
        f"{facts['date']}, {facts['machine']}; {versions}.",
        f"{sizes['seeds']} paired seeds of {sizes['steps']} steps.",
        "",
        f"    {facts['command']}",
        "",
        f"Times, memory, gradient errors and losses: `{beside(page, part, '.txt').name}` beside this page; every seed:",
        f"`{beside(page, part, '.json').name}`.",
    ]
    beside(page, part, ".txt").write_text(result["table"] + "\n", encoding="utf-8")
    drawn = out / f"{part}.png"
    if drawn.is_file():
        picture = beside(page, part, ".png")
        picture.write_bytes(drawn.read_bytes())
        lines += ["", f"![Precisions compared on the part {part}]({picture.name})"]
    return lines
