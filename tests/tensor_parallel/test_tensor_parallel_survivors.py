"""Tensor parallelism where a small slip would go unnoticed: shared inputs, random numbers, frozen layers, the loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_runs import fsdp2
from gloo import process_group, run_ranks
from small_models import loader, quiet_trainer
from test_tensor_parallel_plan import HuggingFace
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from lightning_mp.checkpoints.fused_qkv import convert_optimizer_states, hold_in_rank_order
from lightning_mp.core.rank_rng import RankRNG
from lightning_mp.tensor_parallel.apply import TensorParallelSplit
from lightning_mp.tensor_parallel.layers import SharedInput, split_layer
from lightning_mp.tensor_parallel.plan import check_divisible, resolve_plan
from lightning_mp.tensor_parallel.sequence_parallel import (
    check_sequence_styles,
    split_sequence_of_blocks,
    take_whole_sequence,
    work_on_parts,
)
from lightning_mp.tensor_parallel.vocab_parallel_logits import VocabParallelSplit, split_logits

CPU = torch.device("cpu")
IDS = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(3))


def test_a_shared_input_is_made_once_for_each_value_of_each_tensor() -> None:
    shared, first, second = SharedInput(), torch.ones(2), torch.ones(2)
    made: list[int] = []

    def made_for(value: Tensor) -> int:
        shared(value, lambda: made.append(1) or value.clone())
        return len(made)

    assert [made_for(first), made_for(first), made_for(second), made_for(first)] == [1, 1, 2, 3]
    first.add_(1)
    assert made_for(first) == 4
    with torch.no_grad():
        assert made_for(first) == 5
    shared.forget()
    with torch.no_grad():
        assert made_for(first) == 6


@pytest.mark.parametrize("styles", [("column", "row"), ("column_gather",), ("vocab_parallel_head",)])
def test_layers_let_the_input_that_they_shared_go(styles: tuple[Any, ...]) -> None:
    """Kept, it would hold the activations of a layer until the next one."""

    def run(rank: int) -> list[int]:
        with process_group():
            mesh, shared, value = init_device_mesh("cpu", (1,)), SharedInput(), torch.ones(2, 3, 4)
            hidden, made = value, []
            for style in styles:
                layer = nn.Linear(4, 4)
                split_layer(layer, style, mesh, shared=shared)
                hidden = layer(hidden)
            shared(value, lambda: made.append(1) or value)
            return made

    assert run_ranks(run, 1) == [[1]]


def test_frozen_layers_stay_frozen_when_they_are_split() -> None:
    def run(rank: int) -> Any:
        with process_group():
            mesh, linear, norm = init_device_mesh("cpu", (2,)), nn.Linear(4, 4), nn.LayerNorm(4)
            linear.bias.requires_grad_(False)
            norm.weight.requires_grad_(False)
            split_layer(linear, "column", mesh, shared=SharedInput())
            work_on_parts(norm, mesh, lambda: False)
            return [parameter.requires_grad for layer in (linear, norm) for parameter in layer.parameters()]

    assert run_ranks(run, 2) == [[True, False, False, True]] * 2


def test_own_random_numbers_are_new_each_time_and_leave_the_common_ones_alone() -> None:
    def drawn(begins: int, rank: int) -> tuple[list[float], float]:
        torch.manual_seed(1)
        numbers, own = RankRNG(rank, lambda: True), []
        for _ in range(2):
            for _ in range(begins):  # queries, keys and values each begin
                numbers.begin(CPU)
            own.append(torch.rand(()).item())
            numbers.end()
        return own, torch.rand(()).item()

    (mine, common), (theirs, other_common) = drawn(3, 0), drawn(1, 1)
    assert len({*mine, *theirs}) == 4
    assert common == other_common


class Seeded(HuggingFace):
    """Ranks that begin with other seeds, as a run without ``seed_everything``."""

    def on_fit_start(self) -> None:
        self.masks: list[Tensor] = []
        self.model.transformer.h[0].mlp.dropout.register_forward_hook(
            lambda _, args, output: self.masks.append(output.detach() == 0)
        )


@pytest.mark.full
def test_masks_on_what_all_ranks_have_are_the_same_without_a_common_seed() -> None:
    def run(rank: int) -> Tensor:
        module = Seeded("gpt2", dropout=0.5)
        torch.manual_seed(rank)
        module.train()
        quiet_trainer(devices=2, strategy=fsdp2(tensor_parallel_size=2), max_steps=1).fit(module, loader([[IDS]]))
        return module.masks[0]

    mine, theirs = run_ranks(run, 2)
    assert torch.equal(mine, theirs)


def test_an_exception_in_attention_ends_its_own_numbers_and_evaluation_draws_none() -> None:
    class Stopped(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stopped

    def run(rank: int) -> tuple[bool, float]:
        with process_group():
            gpt = HuggingFace("gpt2").model
            split = TensorParallelSplit(gpt, resolve_plan(gpt, "auto"), init_device_mesh("cpu", (2,)))
            split.layers(dict(gpt.named_modules()))
            attention = gpt.transformer.h[0].attn
            attention.attn_dropout.p = 0.5
            attention.c_proj.register_forward_pre_hook(stop, prepend=True)
            gpt.eval()
            before = torch.get_rng_state()
            with pytest.raises(Stopped):
                gpt(IDS)
            untouched = torch.equal(before, torch.get_rng_state())
            gpt.train()
            with pytest.raises(Stopped):
                gpt(IDS)
            return untouched, torch.rand(()).item()

    (mine, theirs) = run_ranks(run, 2)
    assert mine == theirs
    assert mine[0]


def on_ranks(ranks: int, loss_of: Callable[[int], Any]) -> list[Any]:
    def run(rank: int) -> Any:
        with process_group():
            return loss_of(rank)

    return run_ranks(run, ranks)


def test_pairs_of_ranks_with_different_numbers_of_tokens_do_not_wait_for_each_other() -> None:
    whole = [torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)) for rows in (3, 5)]
    labels = [torch.arange(rows) for rows in (3, 5)]

    def loss_of(rank: int) -> float:
        pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"].get_group()
        split = VocabParallelSplit(pair)
        part = split.own(whole[rank // 2], 1).clone().requires_grad_()
        return F.cross_entropy(split_logits(part * 1, split), labels[rank // 2]).item()

    wanted = [F.cross_entropy(logits, ids).item() for logits, ids in zip(whole, labels, strict=True)]
    assert on_ranks(4, loss_of) == pytest.approx([wanted[0]] * 2 + [wanted[1]] * 2, rel=1e-6)


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
    assert on_ranks(2, loss_of) == [pytest.approx(wanted, rel=1e-6)] * 2


def test_logits_without_a_gradient_are_whole_at_once() -> None:
    """So that one rank alone may look at them."""

    def kind(rank: int) -> bool:
        return type(split_logits(torch.ones(2, 4), VocabParallelSplit(dist.group.WORLD))) is Tensor

    assert on_ranks(2, kind) == [True, True]


def test_norms_of_hugging_face_can_be_named_in_a_plan() -> None:
    plan: Any = {"*layernorm": "sequence", "*": "auto"}
    styles = resolve_plan(HuggingFace("llama").model, plan)
    assert styles["model.layers.1.post_attention_layernorm"] == "sequence"


class GivesATuple(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, int]:
        return hidden * 2, hidden.shape[1]


def test_blocks_whose_sequence_is_split_may_give_tuples() -> None:
    value = torch.arange(8.0).view(1, 4, 2)

    def given(rank: int) -> Any:
        blocks = nn.ModuleList([GivesATuple(), GivesATuple()])
        split_sequence_of_blocks(blocks, init_device_mesh("cpu", (2,)))
        hidden, first = blocks[0](value)
        hidden, last = blocks[1](hidden)
        return hidden.tolist(), first, last

    assert on_ranks(2, given) == [((4 * value).tolist(), 2, 2)] * 2


def test_the_mean_of_many_weighted_rows_does_not_overflow_in_fp16() -> None:
    """Without autocast weights are fp16 as logits are, and their sum is beyond 65504."""
    rows = 70_000
    labels = torch.zeros(rows, dtype=torch.int64)

    def loss_of(rank: int) -> float:
        split = VocabParallelSplit(dist.group.WORLD)
        logits = split_logits(torch.zeros(rows, 1, dtype=torch.float16, requires_grad=True) * 1, split)
        return F.cross_entropy(logits, labels, weight=torch.ones(2, dtype=torch.float16)).item()

    assert on_ranks(2, loss_of) == pytest.approx([0.6931] * 2, rel=1e-3)


def test_classes_need_not_be_the_vocabulary() -> None:
    """Over another dimension than the split one each rank would know a part of the rows only."""
    whole = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(16).view(2, 8) % 6

    def loss_of(rank: int) -> float:
        split = VocabParallelSplit(dist.group.WORLD)
        return F.cross_entropy(split_logits(split.own(whole, 2).clone().requires_grad_() * 1, split), labels).item()

    assert on_ranks(2, loss_of) == pytest.approx([F.cross_entropy(whole, labels).item()] * 2, rel=1e-6)


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
    assert on_ranks(2, kinds) == [[True, False]] * 2


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

    on_ranks(2, compare)


def test_a_norm_that_sees_all_tokens_has_their_gradient_once() -> None:
    """A model that is trained in evaluation mode is not split along the sequence."""
    value = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    alone = nn.LayerNorm(6)
    alone(value).square().sum().backward()

    def gradient(rank: int) -> Tensor:
        norm = nn.LayerNorm(6)
        work_on_parts(norm, init_device_mesh("cpu", (2,)), lambda: False)
        norm(value).square().sum().backward()
        return norm.weight.grad.full_tensor()

    for found in on_ranks(2, gradient):
        torch.testing.assert_close(found, alone.weight.grad)


class TakesNames(nn.Module):
    def forward(self, *, causal: bool, hidden: Tensor) -> Tensor:
        return hidden * 1


def test_what_is_gathered_is_the_first_tensor_also_after_other_arguments() -> None:
    def shape(rank: int) -> Any:
        module = TakesNames()
        take_whole_sequence(module, init_device_mesh("cpu", (2,)), lambda: True)
        return tuple(module(causal=True, hidden=torch.ones(1, 2, 3)).shape)

    assert on_ranks(2, shape) == [(1, 4, 3)] * 2


@pytest.mark.parametrize(
    ("blocks", "styles", "says"),
    [
        ([], {}, "blocks is 'sequence' and is empty"),
        ([nn.Linear(2, 2)], {"blocks.0": "row_split"}, "'row_split' in blocks .* would get a part of the tokens"),
    ],
)
def test_blocks_that_cannot_be_split_along_the_sequence_are_refused(blocks: Any, styles: Any, says: str) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
    with pytest.raises(ValueError, match=says):
        check_sequence_styles(model, {"blocks": "sequence"} | styles)


def test_activations_without_samples_are_refused() -> None:
    def refused(rank: int) -> None:
        blocks = nn.ModuleList([nn.Linear(4, 4)])
        split_sequence_of_blocks(blocks, init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match=r"must get activations \[batch, tokens, width\] .* shape \(2, 4\)"):
            blocks[0](torch.ones(2, 4))

    on_ranks(2, refused)


def test_ranks_that_divide_a_fused_matrix_must_divide_its_parts() -> None:
    """Four queries, four keys and four values are twelve rows, and three ranks share none of them evenly."""
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12)})
    with pytest.raises(ValueError, match=r"qkv is split as 'column_qkv' along a dimension of 4, which 3 ranks do not"):
        check_divisible(model, {"qkv": "column_qkv"}, 3)


def test_moments_of_another_shape_have_no_order_for_a_fused_matrix() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(4, 6, bias=False)})
    hold_in_rank_order(model["qkv"], 2, dim_of_weight=0)
    optimizer = torch.optim.Adafactor(model.parameters())
    convert_optimizer_states(model, [optimizer])
    model["qkv"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"Adafactor holds 'row_var' of shape \(6, 1\) .* its order cannot be known"):
        optimizer.state_dict()


def test_a_state_that_was_loaded_can_be_loaded_again() -> None:
    """What a checkpoint holds is not put into the order of ranks with it."""
    model = nn.ModuleDict({"qkv": nn.Linear(4, 6)})
    hold_in_rank_order(model["qkv"], 2, dim_of_weight=0)
    optimizer = torch.optim.AdamW(model.parameters())
    convert_optimizer_states(model, [optimizer])
    (model["qkv"](torch.ones(1, 4)) * torch.arange(6.0)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    wanted = state["state"][0]["exp_avg"].clone()
    for _ in range(2):
        optimizer.load_state_dict(state)
        assert optimizer.state_dict()["state"][0]["exp_avg"].equal(wanted)
