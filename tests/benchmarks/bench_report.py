"""What the benchmark writes: JSON for machines, Markdown for people, replaced as a whole after every step."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench_checks import Check
from bench_epilogue import EpilogueReport
from bench_schedule import NOT_REACHED, Cell, Group, ratio

GIB = 2**30
EPILOGUE_TITLE = "The gradient epilogue alone"


@dataclass(frozen=True)
class Header:
    """What a reader needs to judge or repeat the figures."""

    date: str
    command: str
    device: str
    versions: dict[str, str]
    model: str
    settings: dict[str, Any]
    flops_per_token: int
    flops_convention: str
    flops_parameters: int
    peak_flops_per_second: dict[str, float]
    """Dense peak by precision; absent where the chip or the format is not in the table."""
    peak_source: str
    toy: bool


def as_record(
    header: Header,
    groups: Sequence[Group],
    status: str,
    epilogue: EpilogueReport | str | None = None,
    checks: Sequence[Check] = (),
) -> dict[str, Any]:
    """Everything, ready for JSON; the epilogue's part may be the error that it ended with."""
    return {
        "schema": 3,
        "status": status,
        **asdict(header),
        "epilogue": epilogue.as_record() if isinstance(epilogue, EpilogueReport) else {"error": epilogue},
        "checks": [check.as_record() for check in checks],
        "groups": [
            {
                "title": group.title,
                "precision": group.precision,
                "compiled": group.compiled,
                "cells": [_cell_record(cell, group, header) for cell in group.cells],
            }
            for group in groups
        ],
    }


def _cell_record(cell: Cell, group: Group, header: Header) -> dict[str, Any]:
    rates = cell.rates
    memory = [m.peak_memory_bytes for m in cell.measurements if m is not None and m.peak_memory_bytes is not None]
    record: dict[str, Any] = {
        "recipe": cell.recipe,
        "precision": cell.precision,
        "optimizer": cell.optimizer,
        "clip": cell.clip,
        "tokens_per_second": [m.tokens_per_second if m is not None else None for m in cell.measurements],
        "median": median(rates) if rates else None,
        "min": min(rates, default=None),
        "max": max(rates, default=None),
        "mfu": None,
        "peak_memory_bytes": max(memory, default=None),
        "skipped_steps": sum(m.skipped_steps for m in cell.measurements if m is not None),
        "error": cell.error,
        "ratios": {},
    }
    peak = header.peak_flops_per_second.get(cell.precision)
    if rates and peak is not None:
        record["mfu"] = median(rates) * (group.flops_per_token or header.flops_per_token) / peak
    for baseline in group.cells:
        found = ratio(cell, baseline) if baseline.recipe in ("stock", "plain") and baseline is not cell else None
        if found is not None:
            record["ratios"][baseline.recipe] = asdict(found)
    return record


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
        f"- MFU: {record['flops_convention']}, {record['flops_per_token']:,} FLOP per token, over the dense "
        f"peak of the matmul format in TFLOP/s: {peaks or 'not known for this device'} ({record['peak_source']})",
        "",
        "tokens/s is the median over the repeats, with the lowest and the highest. A ratio is taken within each "
        "repeat; the table has the median and the range of those. Peak memory is what torch allocated for this cell. "
        "ours is a plugin of this package (AutocastPrecision if none is named), stock is Lightning's own, plain a loop "
        "written by hand. Lightning refuses gradient clipping with a "
        "fused optimizer under autocast: there stock clips with the foreach optimizer, and is shown fused without "
        "clipping as well.",
    ]
    for group in record["groups"]:
        lines += ["", f"## {group['title']}", ""]
        lines += [
            "| recipe | precision | optimizer | clip | tokens/s | MFU | memory | times stock | times plain | note |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [_row(cell, record["settings"]["repeats"]) for cell in group["cells"]]
    lines += _epilogue_lines(record["epilogue"])
    lines += [line for check in record["checks"] for line in check_lines(check)]
    return "\n".join(lines) + "\n"


def _epilogue_lines(epilogue: dict[str, Any]) -> list[str]:
    heading = ["", f"## {EPILOGUE_TITLE}", ""]
    if "error" in epilogue:
        return [*heading, epilogue["error"] or "Not measured: the run ended first."]
    lines = [
        *heading,
        f"From the end of backward to the optimizer's kernel, on {epilogue['gradient_bytes'] / GIB:.3g} GiB of fp32 "
        f"gradients of this model. The floor is reading them once: {epilogue['floor_seconds'] * 1e3:.4g} ms at the "
        f"{epilogue['copy_bytes_per_second'] / 1e9:,.4g} GB/s that a copy reaches here. A pass is every gradient byte "
        "read or written once, so that a way with n passes takes n floors or more.",
        "",
        "| way | passes | ms | times the floor |",
        "|---|---|---|---|",
    ]
    for row in epilogue["rows"]:
        ratio_text = f"{row['times_floor']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        lines.append(f"| {row['name']} | {row['passes']} | {median(row['seconds']) * 1e3:.4g} | {ratio_text} |")
    return lines


def check_lines(check: dict[str, Any]) -> list[str]:
    """One table of `bench_checks`, from its record."""
    lines = ["", f"## {check['title']}", "", check["explanation"], ""]
    if check["rows"]:
        table = [check["heading"], ["---"] * len(check["heading"]), *check["rows"]]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table]
    if check["error"]:
        lines += ["", check["error"]] if check["rows"] else [check["error"]]
    elif not check["rows"]:
        lines.append(NOT_REACHED)
    return lines


def _row(cell: dict[str, Any], repeats: int) -> str:
    measured = cell["median"] is not None
    rate = f"{cell['median']:,.0f} ({cell['min']:,.0f} to {cell['max']:,.0f})" if measured else "-"
    memory = cell["peak_memory_bytes"]
    done = sum(value is not None for value in cell["tokens_per_second"])
    notes = [cell["error"]] if cell["error"] else []
    if measured and done < repeats:
        notes.append(f"{done} of {repeats} repeats")
    if cell["skipped_steps"]:
        notes.append(f"{cell['skipped_steps']} steps skipped")
    fields = [
        cell["recipe"],
        cell["precision"],
        cell["optimizer"],
        "none" if cell["clip"] is None else f"{cell['clip']:g}",
        rate,
        "-" if cell["mfu"] is None else f"{cell['mfu']:.1%}",
        "-" if memory is None else f"{memory / GIB:.2f} GiB",
        _ratio_text(cell["ratios"].get("stock")),
        _ratio_text(cell["ratios"].get("plain")),
        "; ".join(notes).replace("|", "/"),
    ]
    return f"| {' | '.join(fields)} |"


def _ratio_text(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


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
