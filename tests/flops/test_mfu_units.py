"""What MFUMonitor counts where the labels of a batch look like tokens and are none."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from memory_logger import MemoryLogger
from small_models import Trained, fit, weights
from torch import Tensor, nn

from lightning_mp import AccumulationScheduler, ChinchillaBudget, MFUMonitor, TokenLearningRate
from lightning_mp.training.tokens.loss_weighting import Weighting

PEAK = 1e12


def segmentation() -> Trained:
    """A class for every pixel: labels ``[batch, height, width]``."""
    return Trained(
        lambda module, batch: nn.functional.cross_entropy(module.layer(batch[0]), batch[1]),
        layer=lambda: nn.Conv2d(3, 5, 3, padding=1),
    )


def segmented_pictures(sizes: tuple[int, ...] = (4, 4, 4, 4)) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(size, 3, 8, 8, generator=generator), torch.randint(5, (size, 8, 8), generator=generator)]
        for size in sizes
    ]


@pytest.mark.parametrize(
    ("arguments", "counted"),
    [
        ({"unit": "sample"}, 16),
        ({"unit": "sample", "count": lambda batch: len(batch[0])}, 16),
        ({"count": lambda batch: len(batch[0])}, 16),
        ({"count": lambda batch: 7 * len(batch[0])}, 7 * 16),
        ({}, 16 * 64),
    ],
    ids=["unit", "unit and count", "samples", "tokens", "labels"],
)
def test_an_explicit_unit_or_count_beats_integer_labels(arguments: dict[str, Any], counted: int) -> None:
    logger, made = MemoryLogger(), MFUMonitor(peak_flops=PEAK, **arguments)
    fit(segmentation(), segmented_pictures(), made, logger=logger, log_every_n_steps=1)
    totals = made.throughput.totals
    assert (totals.input_tokens, totals.useful_tokens) == (counted, counted)
    per_picture = 2 * 2 * (3 * 3 * 3 * 5 * 8 * 8)  # forward and the gradient of the weight; the input needs none
    assert made.throughput.work.model_flops_per_token == pytest.approx(per_picture * 16 / counted)
    name = "samples_per_second" if counted == 16 else "tokens_per_second"
    assert name in logger.ours()[-1][1]


def test_samples_weigh_micro_batches_as_where_the_scheduler_says_so() -> None:
    def trained(*callbacks: Any) -> list[Tensor]:
        module = segmentation()
        fit(module, segmented_pictures((4, 2, 3, 1)), *callbacks)
        return weights(module)

    expected = trained(AccumulationScheduler({0: 2}, weight_by="sample"))
    for weight_by in ("sample", "auto"):
        scheduler = AccumulationScheduler({0: 2}, weight_by=weight_by)
        assert all(map(torch.equal, trained(MFUMonitor(unit="sample"), scheduler), expected))


@pytest.mark.parametrize(
    "other",
    [lambda: AccumulationScheduler({0: 2}, weight_by="token"), lambda: ChinchillaBudget(tokens=700, save=False)],
    ids=["weights", "budget"],
)
@pytest.mark.parametrize("arguments", [{"unit": "sample"}, {"count": lambda batch: 7 * len(batch[0]), "unit": "token"}])
def test_what_a_monitor_counts_is_its_own(arguments: dict[str, Any], other: Any) -> None:
    """The run ends where it ends without it, with the same weights: a budget and weights count labels."""
    trained, made = [], MFUMonitor(**arguments)
    for callbacks in ([], [made]):
        module = segmentation()
        trainer = fit(module, segmented_pictures(), *callbacks, other())
        trained.append([*weights(module), torch.tensor(trainer.global_step)])
    assert all(map(torch.equal, *trained))
    pictures = made.throughput.totals.input_tokens // (1 if "count" not in arguments else 7)
    assert pictures == (12 if isinstance(other(), ChinchillaBudget) else 16)


def test_an_attention_mask_does_not_hide_samples() -> None:
    """Else there were more samples than there are: four tokens of each sample are seen."""
    batch = {"x": torch.zeros(2, 6), "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)}
    measure = Weighting("token", input_count=lambda batch: len(batch["x"])).measure(batch)
    assert (measure.input_tokens, int(measure.nonpad_tokens)) == (2, 2)


@pytest.mark.parametrize("kind", [int, torch.tensor, partial(torch.tensor, device="meta")])
def test_a_count_is_its_own_bound_and_a_tensor_on_a_device_is_not_read(kind: Any) -> None:
    """Labels of several classes per sample, and more tokens than labels."""
    batch = [torch.zeros(2, 40), torch.zeros(2, 5, dtype=torch.long)]
    measure = Weighting("token", lambda batch: kind(80)).measure(batch)
    assert (measure.input_tokens, measure.most_tokens) == (10, 10 if isinstance(kind, partial) else 80)


def test_samples_of_a_monitor_are_no_tokens_of_a_learning_rate() -> None:
    batches = [[torch.randn(4, 3, 8, 8), torch.randn(4, 5, 8, 8)]]
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="TokenLearningRate"):
        fit(segmentation(), batches, MFUMonitor(unit="sample"), TokenLearningRate(lambda _: 1.0, tokens=100))
