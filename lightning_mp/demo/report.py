"""The results of a run: the figures, the final table and the plot."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_mp.demo.settings import SCALED_PRECISIONS
from lightning_mp.ground.core.cli_text import listed_facts
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.quantities import format_share
from lightning_mp.monitors.diagnostics.run_plot import RunPlot

#: The final training loss is a mean over this share of the steps, since single batches scatter.
_TAIL_SHARE = 0.05
_SKIPS_IN_TABLE = 5


def summarise(history: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The figures of a run, from ``history.json`` and the overflow reports in its folder.

    Losses are in nats per token; a token is a byte.
    """
    steps, validation = history["steps"], history["validation"]["loss"]
    tail = steps["train_loss"][-max(1, round(_TAIL_SHARE * len(steps["train_loss"]))) :]
    train_loss, validation_loss = sum(tail) / len(tail), validation[-1] if validation else None
    copied = ("tokens", "budget_tokens", "tokens_per_second", "mfu", "train_seconds")
    return {
        **{name: history[name] for name in (*copied, "peak_memory_bytes", "device")},
        "optimizer_steps": len(steps["tokens"]),
        "skipped_steps": sum(steps["skipped"]),
        "train_loss": train_loss,
        "train_bits_per_byte": train_loss / math.log(2),
        "validation_loss": validation_loss,
        "validation_bits_per_byte": None if validation_loss is None else validation_loss / math.log(2),
        "skips": [_skip(steps, step, folder) for step, skipped in enumerate(steps["skipped"]) if skipped],
    }


def _skip(steps: Mapping[str, Any], step: int, folder: Path) -> dict[str, Any]:
    report = folder / f"overflow_step_{step}.json"
    skip = {"step_index": step, "parameters": json.loads(report.read_text())["parameters"] if report.is_file() else []}
    for name in ("loss_scale", "learning_rate"):
        skip[name], skip[f"next_{name}"] = (*steps[name], None)[step : step + 2]
    return skip


def format_table(summary: Mapping[str, Any], folder: Path) -> str:
    """The table for the terminal."""
    share = summary["tokens"] / summary["budget_tokens"]
    memory = "allocated on the GPU" if summary["device"] not in ("cpu", "mps") else "resident"
    rows = [
        ("tokens", f"{summary['tokens']:,}"),
        ("budget", f"{summary['budget_tokens']:,} ({'spent exactly' if share == 1 else f'{share:.1%} spent'})"),
        ("optimizer steps", f"{summary['optimizer_steps']:,}"),
        ("skipped", f"{summary['skipped_steps']:,}"),
        ("train loss", f"{_loss(summary['train_loss'])}, mean of the last {_TAIL_SHARE:.0%} of the steps"),
        ("validation loss", _loss(summary["validation_loss"])),
        ("tokens per second", f"{summary['tokens_per_second'] or 0:,.0f} on {summary['device']}"),
        ("MFU", "" if summary["mfu"] is None else format_share(summary["mfu"])),
        ("time in training", f"{summary['train_seconds']:.1f} s, without validation"),
        ("peak memory", f"{summary['peak_memory_bytes'] / 2**20:,.0f} MiB {memory}"),
        *(("skipped step", _describe_skip(skip)) for skip in summary["skips"][:_SKIPS_IN_TABLE]),
    ]
    if len(summary["skips"]) > _SKIPS_IN_TABLE:
        rows.append(("", f"and {len(summary['skips']) - _SKIPS_IN_TABLE} more, see summary.json"))
    rows += [("results in", str(folder)), ("", ", ".join(sorted(path.name for path in folder.iterdir())))]
    return listed_facts([(name, value) for name, value in rows if value], width=17)


def _loss(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.3f} nats, {loss / math.log(2):.3f} bits per byte"


def _describe_skip(skip: Mapping[str, Any]) -> str:
    text = f"{skip['step_index']}: loss scale {skip['loss_scale']:.10g}"
    if skip["next_loss_scale"] is not None:
        now, following = skip["learning_rate"], skip["next_learning_rate"]
        verb = "held at" if now == following else f"{now:.3e} ->"
        text += f" -> {skip['next_loss_scale']:.10g}, learning rate {verb} {following:.3e}"
    return f"{text}, not finite: {listed(skip['parameters'], 2) or 'unknown'}"


def plot_of(history: Mapping[str, Any]) -> RunPlot:
    """The picture of ``history.json``; a token is a byte."""
    plan, settings = history["plan"], history["settings"]
    devices = f"{settings['devices']} x {history['device']}" if settings["devices"] > 1 else history["device"]
    share = history["tokens"] / history["budget_tokens"]
    spent = "exactly its budget" if share == 1 else f"{share:.0%} of its budget"
    return RunPlot(
        history["steps"],
        history["validation"],
        precision=settings["precision"],
        has_loss_scale=settings["precision"] in SCALED_PRECISIONS,
        micro_batch_tokens=plan["micro_batch_tokens"],
        budget_tokens=history["budget_tokens"],
        title=f"{plan['parameters']:,} parameters, {settings['precision']} on {devices}, "
        f"{history['tokens_per_second'] or 0:,.0f} tokens/s\n"
        f"{history['tokens']:,} tokens: {spent} of {settings['tokens_per_parameter']:g} per parameter",
        token="byte",
        highest_loss=math.log(256),  # of a uniform guess
    )
