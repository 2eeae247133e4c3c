"""What the benchmark writes: JSON for machines, Markdown for people, replaced as a whole after every step."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench_schedule import NOT_REACHED, Cell, Group, Part, ratio

GIB = 2**30
HEADING = (
    *("way", "precision", "optimizer", "tokens/s", "MFU", "memory"),
    *("after backward, ms", "times its floor", "times stock", "times plain", "note"),
)


@dataclass(frozen=True)
class Header:
    """What a reader needs to judge or repeat the figures."""

    date: str
    command: str
    device: str
    versions: dict[str, str]
    model: str
    settings: dict[str, Any]
    flops_convention: str
    peak_flops_per_second: dict[str, float]
    """Dense peak by precision; absent where the chip or the format is not in the table."""
    peak_source: str
    copy_bytes_per_second: float
    toy: bool


def as_record(header: Header, parts: Sequence[Part], status: str) -> dict[str, Any]:
    """Everything, ready for JSON."""
    return {
        "schema": 4,
        "status": status,
        **asdict(header),
        "parts": [
            {
                "title": part.title,
                "explanation": part.explanation,
                "heading": part.heading if part.group is None else HEADING,
                "cells": [] if part.group is None else [_numbers(c, part.group, header) for c in part.group.cells],
                "rows": part.rows if part.group is None else [_row(c, part.group, header) for c in part.group.cells],
                "error": part.error,
            }
            for part in parts
        ],
    }


def _numbers(cell: Cell, group: Group, header: Header) -> dict[str, Any]:
    measured = [m for m in cell.measurements if m is not None]
    peak = header.peak_flops_per_second.get(cell.precision)
    step_seconds = median([m.step_seconds for m in measured if m.step_seconds is not None] or [0.0]) or None
    floor_bytes = cell.floor_bytes and cell.floor_bytes * group.parameters
    ratios = {recipe: ratio(cell, group.baseline(cell, recipe)) for recipe in ("stock", "plain")}
    return {
        "recipe": cell.recipe,
        "precision": cell.precision,
        "optimizer": cell.optimizer,
        "tokens_per_second": [m and m.tokens_per_second for m in cell.measurements],
        "mfu": median(cell.rates) * group.flops_per_token / peak if measured and peak else None,
        "peak_memory_bytes": max((m.peak_memory_bytes for m in measured if m.peak_memory_bytes), default=None),
        "step_seconds": step_seconds,
        "floor_seconds": floor_bytes and floor_bytes / header.copy_bytes_per_second,
        "skipped_steps": sum(m.skipped_steps for m in measured),
        "ratios": {recipe: asdict(found) for recipe, found in ratios.items() if found is not None},
        "error": cell.error,
    }


def _row(cell: Cell, group: Group, header: Header) -> list[str]:
    numbers, rates = _numbers(cell, group, header), cell.rates
    step, floor, memory = numbers["step_seconds"], numbers["floor_seconds"], numbers["peak_memory_bytes"]
    notes = [cell.error] if cell.error else []
    if rates and len(rates) < group.repeats:
        notes.append(f"{len(rates)} of {group.repeats} repeats")
    if numbers["skipped_steps"]:
        notes.append(f"{numbers['skipped_steps']} steps skipped")
    return [
        cell.recipe,
        cell.precision,
        cell.optimizer,
        f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})" if rates else "-",
        "-" if numbers["mfu"] is None else f"{numbers['mfu']:.1%}",
        "-" if memory is None else f"{memory / GIB:.2f} GiB",
        "-" if step is None else f"{step * 1e3:.4g}",
        "-" if step is None or not floor else f"{step / floor:.2f}",
        *(str(ratio(cell, group.baseline(cell, recipe)) or "-") for recipe in ("stock", "plain")),
        "; ".join(notes),
    ]


def as_markdown(record: dict[str, Any]) -> str:
    """The same as tables."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    settings = ", ".join(f"{name} {value}" for name, value in record["settings"].items())
    peaks = ", ".join(f"{name} {value / 1e12:g}" for name, value in record["peak_flops_per_second"].items())
    lines = [
        f"# {'Toy run of the GPU benchmark' if record['toy'] else 'GPU benchmark'}, {record['date']}",
        "",
        *(["**Toy size: these figures say nothing about any device.**", ""] if record["toy"] else []),
        f"- Status: {record['status']}",
        f"- Device: {record['device']}",
        f"- Versions: {versions}",
        f"- Command: `{record['command']}`",
        f"- Model: {record['model']}",
        f"- Settings: {settings}",
        f"- MFU: {record['flops_convention']}, over the dense peak of the matmul format in TFLOP/s: "
        f"{peaks or 'not known for this device'} ({record['peak_source']})",
        f"- Floor: the bytes that AdamW with clipping by norm must move, at the "
        f"{record['copy_bytes_per_second'] / 1e9:,.4g} GB/s that a copy reaches here",
        "",
        "tokens/s is the median over the repeats, with the lowest and the highest. A ratio is taken within each "
        "repeat; the table has the median and the range of those. Memory is the peak of what torch allocated for this "
        "way. After backward is the time from the end of backward to the stepped weights, median over steps. ours is a "
        "plugin of this package, stock is Lightning's own, plain a loop written by hand. Everything is clipped at norm "
        "1 unless the row says otherwise; Lightning refuses that with a fused optimizer under autocast, so stock clips "
        "with the foreach optimizer there.",
        *(line for part in record["parts"] for line in part_lines(part)),
    ]
    return "\n".join(lines) + "\n"


def part_lines(part: dict[str, Any]) -> list[str]:
    """One part, from its record."""
    lines = ["", f"## {part['title']}", "", part["explanation"], ""]
    if part["rows"]:
        table = [part["heading"], ["---"] * len(part["heading"]), *part["rows"]]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table]
    if part["error"]:
        lines += ["", part["error"]] if part["rows"] else [part["error"]]
    elif not part["rows"]:
        lines.append(NOT_REACHED)
    return lines


def write_report(record: dict[str, Any], stem: Path) -> tuple[Path, Path]:
    """Writes `<stem>.json` and `<stem>.md`, each replaced at once so that a kill leaves the one before."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    texts = {".json": json.dumps(record, indent=1) + "\n", ".md": as_markdown(record)}
    for suffix, text in texts.items():
        target = stem.with_name(stem.name + suffix)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
    return stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".md")
