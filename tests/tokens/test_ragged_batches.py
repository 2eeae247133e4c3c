"""Batches whose tensors have different numbers of rows: one warning, and `count=` for the mean that is meant."""

import re
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from small_models import fit, loader, quiet_trainer, weights
from torch import Tensor, nn

from lightning_mp import AccumulationScheduler, ChinchillaBudget, GradientNoiseScale, MFUMonitor
from lightning_mp.training.tokens.count_unit import samples_of
from lightning_mp.training.tokens.loss_weighting import Weighting
from lightning_mp.training.tokens.ragged_batches import RaggedBatches, rows_differ

WARNING = "Tensors in a batch have different numbers of rows"
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str = "text"


def graphs(num_graphs: int, generator: torch.Generator) -> dict[str, Tensor]:
    nodes = torch.randint(2, 6, (num_graphs,), generator=generator)
    return {
        "x": torch.randn(int(nodes.sum()), 8, generator=generator),
        "batch": torch.repeat_interleave(torch.arange(num_graphs), nodes),
        "y": torch.randn(num_graphs, generator=generator),
    }


def graph_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [graphs(num_graphs, generator) for num_graphs in (3, 5, 2, 4)]


class GraphModel(pl.LightningModule):
    """Its loss is a mean over graphs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        summed = torch.zeros(len(batch["y"]), 1).index_add_(0, batch["batch"], self.layer(batch["x"]))
        return (summed.squeeze(1) - batch["y"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plain_loop(rows_of: str) -> list[Tensor]:
    """Windows of three batches, each batch weighed by the rows of one of its tensors."""
    model, batches = GraphModel(), graph_batches()
    optimizer = model.configure_optimizers()
    for window in (batches[:3], batches[3:]):
        optimizer.zero_grad()
        total = sum(len(batch[rows_of]) for batch in window)
        for batch in window:
            (model.loss(batch) * len(batch[rows_of]) / total).backward()
        optimizer.step()
    return weights(model)


def trained(order: tuple[str, ...], **arguments: Any) -> list[Tensor]:
    model = GraphModel()
    batches = [{key: batch[key] for key in order} for batch in graph_batches()]
    fit(model, batches, AccumulationScheduler({0: 3}, **arguments))
    return weights(model)


@pytest.mark.parametrize("order", [("x", "batch", "y"), ("y", "x", "batch")])
def test_a_graph_batch_is_weighed_by_its_first_tensor_with_a_warning(order: tuple[str, ...]) -> None:
    with pytest.warns(UserWarning, match=WARNING) as told:
        found = trained(order, weight_by="sample")
    torch.testing.assert_close(found, plain_loop(order[0]))
    messages = [str(warning.message) for warning in told if WARNING in str(warning.message)]
    assert len(messages) == 1
    others = {"x": ("batch['x'] has 11", "batch['y'] has 3"), "y": ("batch['y'] has 3", "batch['x'] has 11")}[order[0]]
    assert ", ".join(others) in re.sub(r"'] has \d\d", "'] has 11", messages[0])
    assert f"The rows of the first tensor, batch['{order[0]}'], are taken for the samples of the batch" in messages[0]
    assert "pass count=, a function from a batch to the number that its loss is a mean over" in messages[0]


@pytest.mark.parametrize("order", [("x", "batch", "y"), ("y", "x", "batch")])
def test_the_loss_tells_that_it_is_a_mean_over_graphs(order: tuple[str, ...]) -> None:
    torch.testing.assert_close(trained(order), plain_loop("y"))


@pytest.mark.parametrize("order", [("x", "batch", "y"), ("y", "x", "batch")])
def test_count_gives_the_mean_over_graphs_in_any_order(order: tuple[str, ...]) -> None:
    """Warnings are errors here."""
    torch.testing.assert_close(trained(order, count=lambda batch: len(batch["y"])), plain_loop("y"))


TOKENS = torch.zeros(1, 12, dtype=torch.int64)
ALIKE: dict[str, Any] = {
    "tensor": torch.zeros(4, 3),
    "list": [torch.zeros(4, 3), torch.zeros(4)],
    "nested": {"x": (torch.zeros(4), [torch.zeros(4, 2)]), "y": torch.zeros(4, dtype=torch.int64)},
    "named tuple": Pair(torch.zeros(4, 3), torch.zeros(4)),
    "dataclass": Sample(torch.zeros(4, 3), torch.zeros(4)),
    "0-d tensors, numbers and text": [torch.zeros(4), torch.tensor(0.5), 3, "text", ["a", "b"], None, b"bytes"],
    "images and classes": [torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)],
    "loaders alike": [torch.zeros(4, 3), {"x": torch.zeros(4)}],
}
RAGGED: dict[str, tuple[Any, str]] = {
    "list": ([torch.zeros(9, 3), torch.zeros(4)], "batch[0] has 9, batch[1] has 4"),
    "nested": ({"a": (torch.zeros(9), [torch.zeros(4)])}, "batch['a'][0] has 9, batch['a'][1][0] has 4"),
    "dataclass": (Sample(torch.zeros(9, 3), torch.zeros(4)), "batch.x has 9, batch.y has 4"),
    "loaders": ({"a": torch.zeros(9, 3), "b": torch.zeros(4, 3)}, "batch['a'] has 9, batch['b'] has 4"),
    "images of several sizes": (
        [[torch.zeros(3, 8, 8), torch.zeros(3, 4, 4)], torch.zeros(2)],
        "batch[0][0] has 3, batch[1] has 2",
    ),
    "many sizes": (
        [torch.zeros(n) for n in range(1, 10)],
        "batch[0] has 1, batch[1] has 2, batch[2] has 3, batch[3] has 4, batch[4] has 5 and 4 more",
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_batches_with_as_many_rows_everywhere_say_nothing(name: str) -> None:
    assert not rows_differ(ALIKE[name])
    RaggedBatches("", "").look(ALIKE[name])


@pytest.mark.parametrize("name", RAGGED)
def test_other_batches_are_told_of_once(name: str) -> None:
    batch, sizes = RAGGED[name]
    ragged = RaggedBatches("what comes.", "what helps.")
    ragged.look(ALIKE["list"])
    with pytest.warns(UserWarning, match=re.escape(f"rows: {sizes}. The rows of the first")):
        ragged.look(batch)
    ragged.look(batch)


@pytest.mark.parametrize(
    ("weighting", "batch", "takes_rows"),
    [
        (Weighting("sample"), {"x": torch.zeros(2)}, True),
        (Weighting("batch"), {"x": torch.zeros(2)}, False),
        (Weighting("token", counts_samples=True), {"labels": TOKENS, "cu_seqlens": torch.zeros(4)}, False),
        (Weighting("token", count=len, counts_samples=True), {"x": torch.zeros(2)}, False),
        (Weighting("batch", counts_samples=True), {"x": torch.zeros(2)}, True),
        (Weighting("batch", input_count=samples_of), {"x": torch.zeros(2)}, True),
    ],
)
def test_rows_matter_where_nothing_else_tells_the_samples(weighting: Weighting, batch: Any, takes_rows: bool) -> None:
    assert weighting.takes_rows(batch) is takes_rows


IMAGE = torch.zeros(3, 8, 8)
LISTS: dict[str, tuple[list[Any], bool]] = {
    "images": ([[IMAGE] * 4, [IMAGE] * 2], True),
    "images and text": ([{"x": [IMAGE] * 4, "y": "a"}, {"x": [IMAGE] * 2, "y": "b"}], True),
    "one length": ([[IMAGE] * 4, [IMAGE] * 4], False),
    "inputs and targets": ([[torch.zeros(4, 2)] * 2, [torch.zeros(1, 2)] * 2], False),
    "views, and one without": ([[torch.zeros(4, 2)] * 2, [torch.zeros(3, 2)]], False),
    "detection": ([([IMAGE] * n, [{"boxes": torch.zeros(3, 4)}] * n) for n in (4, 2)], False),
    "tensors": ([torch.zeros(4, 2), torch.zeros(1, 2)], False),
    "nothing": ([[], None, "text"], False),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_another_length_may_be_lists_of_samples(name: str) -> None:
    batches, tells = LISTS[name]
    ragged = RaggedBatches("what comes.", "what helps.")
    text = "A batch is a list of 2 tensors, and one before it was of 4; all tensors have 3 rows. .*: what comes. what h"
    with pytest.warns(UserWarning, match=text) if tells else nullcontext():
        for batch in batches:
            ragged.look(batch)


class Detector(GraphModel):
    """Its loss is a mean over images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 1, 1)

    def loss(self, batch: Any) -> Tensor:
        return torch.stack([self.layer(image).square().mean() for image in batch[0]]).mean()


def detection_batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            tuple(torch.randn(3, 4, 4, generator=generator) for _ in range(count)),
            tuple({"boxes": torch.zeros(boxes, 4)} for boxes in range(count)),
        )
        for count in (4, 4, 1)
    ]


def test_a_batch_of_detection_is_weighed_by_its_images() -> None:
    """Warnings are errors here. Three channels had counted as three samples of each batch."""
    model, batches = Detector(), detection_batches()
    optimizer = model.configure_optimizers()
    for batch in batches:
        (model.loss(batch) * len(batch[0]) / 9).backward()
    optimizer.step()
    found = Detector()
    monitor = MFUMonitor(unit="sample", flops_per_token=1.0)
    fit(found, batches, AccumulationScheduler({0: 3}), monitor)
    torch.testing.assert_close(weights(found), weights(model))
    assert monitor.throughput.totals.input_tokens == 9


def test_monitors_that_count_samples_say_which_rows_they_take() -> None:
    """With windows weighed by batches nothing else had said it."""
    for monitor in (MFUMonitor(unit="sample", flops_per_token=1.0), GradientNoiseScale()):
        scheduler = AccumulationScheduler({0: 2}, weight_by="batch")
        with pytest.warns(UserWarning, match=WARNING) as told:
            fit(GraphModel(), graph_batches(), scheduler, monitor)
        assert sum(WARNING in str(warning.message) for warning in told) == 1


def count_graphs(batch: dict[str, Tensor]) -> int:
    return len(batch["y"])


def test_their_count_is_taken_and_nothing_is_said() -> None:
    """Warnings are errors here. MFUMonitor had refused to call 3 graphs of 11 nodes samples."""
    counted = MFUMonitor(unit="sample", count=count_graphs, flops_per_token=1.0)
    for monitor in (counted, GradientNoiseScale(count=count_graphs)):
        scheduler = AccumulationScheduler({0: 2}, weight_by="batch")
        fit(GraphModel(), graph_batches(), scheduler, monitor)
    assert counted.throughput.totals.input_tokens == 14


class Packed(GraphModel):
    def loss(self, batch: Any) -> Tensor:
        return self.layer.weight.square().sum() + self.layer.bias.square().sum()


def test_packed_sequences_with_labels_say_nothing() -> None:
    """A row of several texts, whose ends stand in a tensor of another length: the labels are its tokens."""
    batch = {"input_ids": TOKENS, "labels": TOKENS, "cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32)}
    fit(Packed(), [batch] * 4, AccumulationScheduler({0: 2}), GradientNoiseScale())
    fit(Packed(), [batch] * 4, ChinchillaBudget(tokens=24))


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_loaders_with_batches_of_two_sizes(mode: str) -> None:
    loaders = CombinedLoader(
        {"a": loader([torch.zeros(9, 3)] * 3), "b": loader([torch.zeros(4, 3)] * 3)},
        mode,  # type: ignore[arg-type]
    )
    with pytest.warns(UserWarning, match=r"batch\['a'\] has 9, batch\['b'\] has 4"):
        quiet_trainer(callbacks=[AccumulationScheduler({0: 2}, weight_by="sample")]).fit(Packed(), loaders)
