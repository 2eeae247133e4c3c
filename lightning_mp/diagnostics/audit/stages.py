"""One audit of a model that is split into stages, from those of the stages."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_mp.diagnostics.audit.records import AuditReport, ModuleRecord, OperationRecord
from lightning_mp.modules.stage_placeholder import StagePlaceholder


def join_stages(reports: Sequence[AuditReport], names: Sequence[str]) -> AuditReport:
    """The report of the whole model.

    What a module did is taken from the stages that hold it. What all stages do alike, as the step around the model,
    counts once.

    Example:
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
        modules=tuple(_joined(held[name]) for name in dict.fromkeys(names) if name in held),
        operations=tuple(replace(key, calls=number) for key, number in calls.items()),
        compiled=any(report.compiled for report in reports),
        unseen=tuple(dict.fromkeys(name for report in reports for name in report.unseen)),
    )


def _joined(rows: Sequence[ModuleRecord]) -> ModuleRecord:
    """Of a module that several stages hold: a container, the model, or one with tied weights."""
    first = rows[0]

    def seen(field: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(dtype for row in rows for dtype in getattr(row, field)))

    told = dict.fromkeys(row.autocast for row in rows if row.autocast != "?")
    return ModuleRecord(
        name=first.name,
        class_name=first.class_name,
        weights=seen("weights"),
        inputs=seen("inputs"),
        outputs=seen("outputs"),
        output_gradients=seen("output_gradients"),
        weight_gradients=seen("weight_gradients"),
        autocast=", ".join(told) or "?",
        calls=max(row.calls for row in rows),
    )
