"""An audit as text that fits into a terminal."""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.modules.names import numbers_as_stars
from lightning_mp.ground.modules.stage_placeholder import StagePlaceholder
from lightning_mp.monitors.diagnostics.audit.records import AuditReport, ModuleRecord, OperationRecord

_LABELS = ("weights", "in", "runs", "out", "gradient of out", "gradient of weights")
_SHOWN_KINDS = ("matmul", "softmax", "norm", "loss")
_COMPILED = (
    "Part of the step was compiled: what the compiler fused is not seen here, and modules inside have no row of their"
    " own calls. Audit once without torch.compile to see all of it."
)
_UNSEEN = "Not called where it could be seen (compiled, TorchScript, or another module uses their weights): "
_COLUMNS, _MOST_COLUMNS = 80, 120


def table_rows(report: AuditReport) -> list[tuple[str, ...]]:
    """One row per module with weights or with a product, softmax, norm or loss; equal rows share one.

    "Runs" has these operations with the dtype they computed in, and products of backward that ran in another one; where
    there are none, the dtypes of whatever else the module computed.
    """
    grouped: dict[tuple[str, ...], list[str]] = {}
    for module in report.modules:
        own = report.of_module(module.name)
        if module.weights or any(row.kind in _SHOWN_KINDS for row in own):
            cells = (numbers_as_stars(module.name), *_cells(module, own))
            grouped.setdefault(cells, []).append(module.name)
    rows = []
    for cells, names in grouped.items():
        name = (names[0] or "(the step)") if len(names) == 1 else f"{cells[0]} ({len(names)})"
        rows.append((name, *cells[1:]))
    return rows


def audit_table(report: AuditReport) -> str:
    """The rows as text, two lines each: module and autocast, then the dtypes. What could not be seen is below."""
    columns = min(shutil.get_terminal_size((_COLUMNS, 24)).columns, _MOST_COLUMNS)
    lines = ["Precision audit"]
    for name, class_name, *dtypes, autocast in table_rows(report):
        lines.append(f"{name}: {class_name}, autocast {autocast}")
        shown = [f"{label} {dtype}" for label, dtype in zip(_LABELS, dtypes, strict=True) if dtype != "-"]
        lines += _filled("; ".join(shown), columns, indent="    ")
    notes = [_COMPILED] if report.compiled else []
    if report.unseen:
        notes.append(f"{_UNSEEN}{listed(report.unseen)}.")
    return "\n".join([*lines, *(line for note in notes for line in _filled(note, columns))])


def _filled(text: str, columns: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,  # the end of a module's name says which one it is
        break_on_hyphens=False,
    )


def _cells(module: ModuleRecord, own: Sequence[OperationRecord]) -> tuple[str, ...]:
    return (
        module.class_name,
        _joined(module.weights),
        _joined(module.inputs),
        _runs(own),
        _joined(module.outputs),
        _joined(module.output_gradients),
        _joined(module.weight_gradients),
        module.autocast,
    )


def _runs(own: Sequence[OperationRecord]) -> str:
    shown = [row for row in own if row.kind in _SHOWN_KINDS]
    there = dict.fromkeys(f"{row.operation} {row.compute}" for row in shown if row.phase != "backward")
    if not there:
        return _joined(list(dict.fromkeys(row.compute for row in own if row.phase != "backward")))
    dtypes = {row.compute for row in shown if row.phase != "backward"}
    back = dict.fromkeys(
        f"{row.operation} {row.compute} in backward"
        for row in shown
        if row.phase == "backward" and row.kind == "matmul" and row.compute not in dtypes
    )
    return ", ".join([*there, *back])


def _joined(dtypes: Sequence[str]) -> str:
    return ", ".join(dtypes) or "-"


def join_stages(reports: Sequence[AuditReport], names: Sequence[str]) -> AuditReport:
    """The report of the whole model.

    What a module did is taken from the stages that hold it. What all stages do alike, as the step around the model,
    counts once.

    >>> held = ModuleRecord("head", "Linear", ("fp32",), ("bf16",), (), (), (), "off", 4)
    >>> absent = ModuleRecord("head", "StagePlaceholder", (), (), (), (), (), "?", 0)
    >>> reports = [AuditReport((row,), (), compiled=False, unseen=()) for row in (absent, held)]
    >>> join_stages(reports, ["head"]).modules == (held,)
    True
    """
    held: dict[str, list[ModuleRecord]] = {}
    calls: dict[OperationRecord, int] = {}
    for report in reports:
        for row in report.modules:
            if row.class_name != StagePlaceholder.__name__:
                held.setdefault(row.name, []).append(row)
        for operation in report.operations:
            key = replace(operation, calls=1)
            calls[key] = max(calls.get(key, 0), operation.calls)
    return AuditReport(
        modules=tuple(_row_of_stages(held[name]) for name in dict.fromkeys(names) if name in held),
        operations=tuple(replace(key, calls=number) for key, number in calls.items()),
        compiled=any(report.compiled for report in reports),
        unseen=tuple(dict.fromkeys(name for report in reports for name in report.unseen)),
    )


def _row_of_stages(rows: Sequence[ModuleRecord]) -> ModuleRecord:
    """Of a module that several stages hold: a container, the model, or one with tied weights."""
    fields = ("weights", "inputs", "outputs", "output_gradients", "weight_gradients")
    seen: dict[str, Any] = {
        field: tuple(dict.fromkeys(dtype for row in rows for dtype in getattr(row, field))) for field in fields
    }
    autocast = ", ".join(dict.fromkeys(row.autocast for row in rows if row.autocast != "?")) or "?"
    return replace(rows[0], **seen, autocast=autocast, calls=max(row.calls for row in rows))
