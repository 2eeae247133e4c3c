"""Logits in parts behave as the whole: rows that do not count, classes, arithmetic, shapes and places."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gloo import run_group
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from lightning_mp.training.tensor_parallel.vocab_parallel_logits import VocabParallelSplit, split_logits


def test_pairs_of_ranks_with_different_numbers_of_tokens_do_not_wait_for_each_other() -> None:
    whole = [torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) for rows in (3, 5)]
    labels = [torch.arange(rows) for rows in (3, 5)]

    def loss_of(rank: int) -> float:
        pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"].get_group()
        split = VocabParallelSplit(pair)
        part = split.own(whole[rank // 2], 1).clone().requires_grad_()
        return F.cross_entropy(split_logits(part * 1, split), labels[rank // 2]).item()

    wanted = [F.cross_entropy(logits, ids).item() for logits, ids in zip(whole, labels, strict=True)]
    assert run_group(loss_of, 4) == pytest.approx([wanted[0]] * 2 + [wanted[1]] * 2, rel=1e-6)


@pytest.mark.parametrize("planted", [torch.inf, torch.nan])
def test_a_row_that_counts_nothing_may_be_anything(planted: float) -> None:
    """As in torch; padding is computed on, too."""
    whole = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    whole[1] = planted
    labels = torch.tensor([2, -100, 7])

    def loss_of(rank: int) -> list[float]:
        split = VocabParallelSplit(dist.group.WORLD)
        logits = split_logits(split.own(whole, 1).clone().requires_grad_() * 1, split)
        return [F.cross_entropy(logits, labels, label_smoothing=smoothing).item() for smoothing in (0.0, 0.1)]

    wanted = [F.cross_entropy(whole, labels, label_smoothing=smoothing).item() for smoothing in (0.0, 0.1)]
    assert run_group(loss_of, 2) == [pytest.approx(wanted, rel=1e-6)] * 2


def test_logits_without_a_gradient_are_whole_at_once() -> None:
    """So that one rank alone may look at them."""

    def kind(rank: int) -> bool:
        return type(split_logits(torch.ones(2, 4), VocabParallelSplit(dist.group.WORLD))) is Tensor

    assert run_group(kind, 2) == [True, True]


def test_the_mean_of_many_weighted_rows_does_not_overflow_in_fp16() -> None:
    """Without autocast weights are fp16 as logits are, and their sum is beyond 65504."""
    rows = 70_000
    labels = torch.zeros(rows, dtype=torch.int64)

    def loss_of(rank: int) -> float:
        split = VocabParallelSplit(dist.group.WORLD)
        logits = split_logits(torch.zeros(rows, 1, dtype=torch.float16, requires_grad=True) * 1, split)
        return F.cross_entropy(logits, labels, weight=torch.ones(2, dtype=torch.float16)).item()

    assert run_group(loss_of, 2) == pytest.approx([0.6931] * 2, rel=1e-3)


def test_classes_need_not_be_the_vocabulary() -> None:
    """Over another dimension than the split one each rank would know a part of the rows only."""
    whole = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(16).view(2, 8) % 6

    def loss_of(rank: int) -> float:
        split = VocabParallelSplit(dist.group.WORLD)
        return F.cross_entropy(split_logits(split.own(whole, 2).clone().requires_grad_() * 1, split), labels).item()

    assert run_group(loss_of, 2) == pytest.approx([F.cross_entropy(whole, labels).item()] * 2, rel=1e-6)


def test_arithmetic_of_logits_in_parts_is_that_of_the_whole() -> None:
    whole = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    scales = torch.arange(16.0).view(2, 8)

    def kinds(rank: int) -> list[bool]:
        split = VocabParallelSplit(dist.group.WORLD)
        logits = split_logits(split.own(whole, 2).clone().requires_grad_() * 1, split)
        total = torch.zeros(2, 8, 8)
        total += logits
        assert total.detach().equal(whole)
        # Classes and tokens are equally many, and only one of them is split.
        assert (logits + logits.transpose(1, 2)).detach().equal(whole + whole.transpose(1, 2))
        scaled = logits * scales[..., None]
        assert scaled.detach().equal(whole * scales[..., None])
        return [type(value) is Tensor for value in (logits.to("meta"), scaled)]

    # On another device there is nobody to gather with; what is the same for all classes leaves parts alone.
    assert run_group(kinds, 2) == [[True, False]] * 2


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda x: x.flatten(),
    "a dimension before the vocabulary": lambda x: x.unsqueeze(2),
    "nothing to squeeze": lambda x: x.squeeze(0),
    "every second class": lambda x: x[..., ::2],
    "the first classes": lambda x: x[..., :7],
    "the last classes": lambda x: x[..., 2:],
    "one class": lambda x: x[..., 3],
    "one sample": lambda x: x[1],
    "one token": lambda x: x[:, 2],
    "some rows": lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 3])],
    "some numbers": lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4, 5])],
    "some numbers by mask": lambda x: x[torch.arange(96).view(2, 6, 8) % 5 == 0],
    "zeros of another size": lambda x: x.new_zeros((2, 3)) + x[:, 0, :3],
}


def test_shapes_and_places_of_logits_in_parts_are_those_of_the_whole() -> None:
    values = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))

    def compare(rank: int) -> None:
        split = VocabParallelSplit(dist.group.WORLD)
        for name, shape in SHAPES.items():
            whole, part = values.clone().requires_grad_(), split.own(values, 2).clone().requires_grad_()
            wanted, got = shape(whole * 1), shape(split_logits(part * 1, split))
            torch.testing.assert_close(got.detach(), wanted.detach(), msg=name)
            weights = torch.arange(float(wanted.numel())).view(wanted.shape)
            (wanted * weights).sum().backward()
            (got * weights).sum().backward()
            torch.testing.assert_close(part.grad, split.own(whole.grad, 2), msg=f"{name}, gradient")
        one_class_each = split_logits(torch.ones(3, 1, requires_grad=True) * 1, split)
        assert one_class_each.squeeze(-1).shape == (3, 2)

    run_group(compare, 2)
