"""Known faults are named by the right monitor, and of models with none no monitor says anything.

The page docs/results/planted_faults.md has both lists; docs/diagnoses.md repeats their rates.
"""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from innocent_models import INNOCENT_MODELS
from lightning.pytorch.plugins import Precision
from planted_causes import PLANTED_CAUSES, Monitor, PlantedCause
from small_models import fit, loader, quiet_trainer

from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor, OverflowPostMortem, UnderflowMonitor
from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.monitors.diagnostics.overflow.report import OverflowReport

_ANYWHERE = ("diverged",)


def diagnose(
    module: pl.LightningModule, batches: list[Any], plugin: Precision, folder: Path
) -> dict[Monitor, list[tuple[str, ...]]]:
    """Trains with every monitor; what each of them found, in order, without repetitions."""
    monitor, underflow, audit = OverflowMonitor(stop_after_skips=5), UnderflowMonitor(every_n_steps=1), PrecisionAudit()
    post_mortem = OverflowPostMortem(replay=module.automatic_optimization, dirpath=folder)
    trainer = quiet_trainer(
        plugins=[plugin], callbacks=[monitor, underflow, audit, post_mortem], default_root_dir=folder
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PrecisionAudit (found|.* has seen nothing)")
        warnings.filterwarnings("ignore", message="OverflowMonitor.stop_after_skips")
        trainer.fit(module, loader(batches))
    return {
        "OverflowPostMortem": list(dict.fromkeys(_name(report) for report in post_mortem.reports)),
        "PrecisionAudit": [(finding.kind, finding.modules[0]) for finding in audit.findings],
        "UnderflowMonitor": _of_scale(underflow, monitor.skipped_steps) if plugin.precision == "16-mixed" else [],
        "OverflowMonitor": [("only skips",)] if monitor.stop_reason is not None else [],
    }


def _name(report: OverflowReport) -> tuple[str, ...]:
    if not report.findings:
        return ("no finding", report.note)
    finding = report.findings[0]
    if finding.first_overflow is None or finding.verdict in _ANYWHERE:
        return (finding.verdict, "", "")
    module = "" if finding.verdict == "scale" else finding.first_overflow.module
    return (finding.verdict, finding.first_overflow.phase, module)


def _of_scale(monitor: UnderflowMonitor, skipped_steps: int) -> list[tuple[str, ...]]:
    """The monitor has numbers, and a reader draws conclusions: the scale is far from what it suggests."""
    found = []
    for summary in (summaries["gradients"] for summaries in monitor.history):
        lost = summary.underflow_fraction + summary.subnormal_fraction
        suggested = summary.suggested_scale
        if suggested is not None and suggested >= 16 * summary.scale and lost > 0.1:
            found.append(("scale too low",))
        if summary.headroom_doublings < 0 and not skipped_steps:
            found.append(("scale too high",))
    return list(dict.fromkeys(found))


DOCS = Path(__file__).resolve().parents[2] / "docs"
QUICK_CAUSES = ("log of zero", "autocast switched off in a layer")
QUICK_MODELS = ("TransformerEncoderLayer with dropout",)
SCALE = 2.0**12


def plugin(precision: str) -> AutocastPrecision:
    scaler = LossScaler(init_scale=SCALE) if precision == "16-mixed" else None
    return AutocastPrecision(precision, scaler=scaler)


def mostly_full(names: Any, quick: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", mostly_full(PLANTED_CAUSES, QUICK_CAUSES))
def test_a_planted_cause_is_named_by_the_right_monitor(name: str, tmp_path: Path) -> None:
    cause = PLANTED_CAUSES[name]
    found = diagnose(cause.make(), cause.batches(), cause.plugin(), tmp_path)
    assert found[cause.monitor][:1] == [cause.named], found


@pytest.mark.parametrize("name", mostly_full(INNOCENT_MODELS, QUICK_MODELS))
def test_of_an_innocent_model_nothing_is_said(name: str, tmp_path: Path) -> None:
    model = INNOCENT_MODELS[name]
    for precision in model.precisions:
        found = diagnose(model.make(), model.batches(2), plugin(precision), tmp_path)
        assert not any(found.values()), (precision, found)


def _row(name: str, cause: PlantedCause) -> str:
    what = ", ".join(f"`{word}`" for word in cause.named if word)
    return f"| {name} | `{cause.monitor}` | {what} |"


def test_the_page_has_every_cause_every_model_and_the_rates() -> None:
    page = (DOCS / "results" / "planted_faults.md").read_text()
    rows = [line for line in page.partition("## Planted causes")[2].splitlines() if line[:2] == "| " and "`" in line]
    assert rows == [_row(name, cause) for name, cause in PLANTED_CAUSES.items()]
    models = page.partition("## Models with nothing wrong")[2]
    assert [line[2:] for line in models.splitlines() if line.startswith("- ")] == list(INNOCENT_MODELS)
    for text in (page, (DOCS / "diagnoses.md").read_text()):
        assert f"{len(PLANTED_CAUSES)} of {len(PLANTED_CAUSES)} planted causes are named" in text
        assert f"{len(INNOCENT_MODELS)} of {len(INNOCENT_MODELS)} models raise no finding" in text


#: Without random numbers of their own.
SCALED_MODELS = (
    *("multi-layer perceptron", "residual CNN", "depthwise CNN", "ViT", "U-Net", "bidirectional GRU", "Llama"),
    *("tied weights, checkpointed", "two towers with a temperature", "detection head", "speech with CTC"),
)


def largest_finite_scale(name: str) -> float:
    """By a plain loop: doubles the scale until a gradient of the first batch is not finite."""
    model = INNOCENT_MODELS[name]
    scale = 1.0
    while True:
        module, [batch] = model.make(), model.batches(1)
        with torch.autocast("cpu", torch.float16):
            loss = module.training_step(batch, 0)
        (loss.float() * 2 * scale).backward()
        if not all(p.grad is None or p.grad.isfinite().all() for p in module.parameters()):
            return scale
        scale *= 2


@pytest.mark.parametrize("name", mostly_full(SCALED_MODELS, ("multi-layer perceptron",)))
def test_the_suggested_scale_is_half_the_largest_that_works(name: str) -> None:
    """In a 16-mixed run, and in a bf16-mixed run that asks whether it could be one."""
    model, real = INNOCENT_MODELS[name], largest_finite_scale(name)
    for precision in model.precisions:
        monitor = UnderflowMonitor(every_n_steps=1)
        fit(model.make(), model.batches(1), monitor, plugin=plugin(precision))
        assert monitor.suggested_scale is not None
        assert real / 2 <= monitor.suggested_scale <= real, (precision, real)
