"""A picture of what is alive during a training step."""

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_mp.core.pictures import check_picture_ending
from lightning_mp.planning.memory.live_storages import PARTS

if TYPE_CHECKING:
    from lightning_mp.planning.memory.estimate import MemoryEstimate


def draw_timeline(estimate: "MemoryEstimate", path: Path) -> None:
    """Draws the parts on top of each other, over the operations of the step."""
    check_picture_ending(path)
    from matplotlib.figure import Figure

    samples = estimate.samples
    unit, name = (2**30, "GiB") if estimate.peak_bytes >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    shown = [part for part in PARTS if any(sample.bytes_by_part.get(part) for sample in samples)]
    heights = [[sample.bytes_by_part.get(part, 0) / unit for sample in samples] for part in shown]
    axes.stackplot(range(len(samples)), heights, labels=shown, step="post")
    for index, sample in enumerate(samples):
        if index == 0 or samples[index - 1].phase != sample.phase:
            axes.axvline(index, color="black", linewidth=0.6)
            side = "right" if index > 0.8 * len(samples) else "left"
            place = len(samples) - 1 if side == "right" else index
            axes.text(place, 1.01, sample.phase, ha=side, va="bottom", transform=axes.get_xaxis_transform())
    axes.set(xlabel="operations that change it", ylabel=f"live tensors, {name}", xlim=(0, max(len(samples) - 1, 1)))
    axes.set_ylim(0, estimate.peak_bytes / unit * 1.05)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    ranks = "" if estimate.ranks == 1 else f" on {estimate.ranks} ranks, each of them"
    axes.set_title(f"{estimate.precision}, {estimate.strategy}{ranks}", fontsize="medium", pad=20)
    figure.savefig(path)
