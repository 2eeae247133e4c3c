"""Style "column_qkv": queries, keys and values in one matrix, split so that a rank has whole heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_runs import (
    assert_close_by_name,
    assert_same,
    assert_same_on_ranks,
    batches,
    fsdp2,
    full_weights,
    model,
    optimizer_states,
    train,
)
from gloo import process_group
from gloo import run_same_ranks as run_ranks
from huggingface_models import HuggingFace
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import Precision
from small_models import at, loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from lightning_mp import MasterWeightsPrecision
from lightning_mp.training.checkpoints.fused_qkv import (
    FusedOrder,
    convert_optimizer_states,
    fused_orders,
    hold_in_rank_order,
)
from lightning_mp.training.tensor_parallel.layers import SharedInput, split_layer
from lightning_mp.training.tensor_parallel.plan import check_divisible, resolve_plan

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

QKV = "model.blocks.0.attention.query_key_value.weight"
TENSOR = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(("ranks", "dim"), [(1, 0), (2, 0), (3, 1), (6, 0)])
def test_a_split_in_rank_order_gives_each_rank_its_rows_of_each_matrix(ranks: int, dim: int) -> None:
    matrices = [torch.arange(12 * 5).view(12, 5) + 1000 * number for number in range(3)]
    matrices = [matrix if dim == 0 else matrix.t() for matrix in matrices]
    whole = torch.cat(matrices, dim)
    order = FusedOrder(ranks, dim)
    by_rank = order.by_rank(whole)
    for rank, own in enumerate(by_rank.chunk(ranks, dim)):
        expected = torch.cat([matrix.chunk(ranks, dim)[rank] for matrix in matrices], dim)
        assert torch.equal(own, expected)
    assert torch.equal(order.by_part(by_rank), whole)


class HeadsSeen(Callback):
    """How many heads attention itself computes on this rank."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.heads: set[int] = set()
        self.plain = F.scaled_dot_product_attention

        def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.heads.add(query.shape[1])
            return self.plain(query, *args, **kwargs)

        F.scaled_dot_product_attention = nn.functional.scaled_dot_product_attention = attention

    def on_fit_end(self, *_: Any) -> None:
        F.scaled_dot_product_attention = nn.functional.scaled_dot_product_attention = self.plain


@pytest.mark.full
@pytest.mark.parametrize("kind", ["demo", "gpt2"])
def test_attention_runs_on_the_heads_of_the_rank(kind: str) -> None:
    def run(rank: int) -> Any:
        seen = HeadsSeen()
        module = model() if kind == "demo" else HuggingFace("gpt2")
        trainer = quiet_trainer(devices=2, strategy=fsdp2(**TENSOR), callbacks=[seen], max_steps=1)
        rows = loader(batches(1))
        trainer.fit(module, rows, *([rows] if kind == "demo" else []))
        return seen.heads, sorted(fused_orders(module))

    for heads, fused in run_ranks(run, 2):
        assert heads == {1}  # of 2
        assert len(fused) == (2 if kind == "demo" else 4)  # GPT-2 has biases


@pytest.mark.full
def test_state_dicts_are_in_the_order_of_one_process() -> None:
    """Before and after training, of the model, of a part of it, and on the way in."""
    before = model().state_dict()

    def run(rank: int) -> Any:
        module = model()
        quiet_trainer(devices=2, strategy=fsdp2(**TENSOR)).validate(module, loader(batches(1)), verbose=False)
        full = full_weights(module)
        part = full_weights(module.model.blocks[0].attention)
        held = module.get_parameter(QKV)
        assert isinstance(held, DTensor)
        module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})
        return full, part, held.full_tensor().detach() / 2, full_weights(module)

    for full, part, held, doubled in run_ranks(run, 2):
        assert full.keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(full[name], value), name
            assert torch.equal(doubled[name], value * 2), name
        assert torch.equal(part["query_key_value.weight"], before[QKV])
        assert torch.equal(held, FusedOrder(2, 0).by_rank(before[QKV]))
        assert not torch.equal(held, before[QKV])


@pytest.mark.full
def test_optimizer_states_are_in_the_order_of_one_process(tmp_path: Path) -> None:
    """A single process writes, 2 ranks go on, 4 ranks go on, a single process ends: weights and moments as without.

    By checkpoints of one file and by sharded ones.
    """
    straight = train(steps=6, plugin=Precision(), save_to=tmp_path / "straight.ckpt")
    legs: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, TENSOR), (4, TENSOR), (1, {})]
    paths = {sharded: [tmp_path / f"{sharded}{number}.ckpt" for number in range(4)] for sharded in (False, True)}

    def leg(rank: int, number: int, sharded: bool) -> Any:
        ranks, arguments = legs[number]
        return train(
            rank,
            ranks,
            fsdp2(save_distributed_checkpoint=sharded and number < 3, **arguments),
            steps=(2, 3, 5, 6)[number],
            plugin=Precision(),
            ckpt_path=paths[sharded][number - 1] if number else None,
            save_to=paths[sharded][number],
        )

    for number, (ranks, _) in enumerate(legs):
        found = run_ranks(lambda rank, number=number: [leg(rank, number, sharded) for sharded in paths], ranks)
        for of_kind in zip(*found, strict=True):
            assert_same_on_ranks(list(of_kind))
    theirs = optimizer_states(tmp_path / "straight.ckpt")
    for ended, (*_, path) in zip(found[0], paths.values(), strict=True):
        assert_same(ended, straight, atol=2e-6)
        assert_close_by_name(optimizer_states(path), theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.full
def test_masters_are_in_the_order_of_one_process(tmp_path: Path) -> None:
    """fp32 weights with bf16 copies; what is written by 2 ranks is what one process writes at the start."""

    def run(rank: int, ranks: int) -> Any:
        plugin = MasterWeightsPrecision("bf16-true")
        strategy = fsdp2(save_distributed_checkpoint=False, **TENSOR) if ranks > 1 else "auto"
        path = tmp_path / f"{ranks}.ckpt"
        train(rank, ranks, strategy, steps=1, plugin=plugin, save_to=path)
        again = MasterWeightsPrecision("bf16-true")
        strategy = fsdp2(save_distributed_checkpoint=False, **TENSOR) if ranks > 1 else "auto"
        return train(rank, ranks, strategy, steps=2, plugin=again, ckpt_path=path)["weights"]

    expected = run(0, 1)
    found = run_ranks(lambda rank: run(rank, 2), 2)
    one, two = (torch.load(tmp_path / f"{ranks}.ckpt", weights_only=True) for ranks in (1, 2))
    assert one["state_dict"][QKV].dtype == two["state_dict"][QKV].dtype == torch.float32
    torch.testing.assert_close(two["state_dict"][QKV], one["state_dict"][QKV], rtol=2e-2, atol=1e-3)
    ours, theirs = (optimizer_states(tmp_path / f"{ranks}.ckpt") for ranks in (2, 1))
    assert_close_by_name(ours, theirs, rtol=5e-2, atol=2e-3)
    for weights in found:
        assert_close_by_name(weights, expected, rtol=5e-2, atol=4e-3)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fp32", "masters"])
def test_optimizers_that_are_made_anew_have_the_order_of_one_process(kind: str, tmp_path: Path) -> None:
    """It was that of ranks, which a later run took for the order of one process."""

    def run(rank: int, ranks: int) -> None:
        plugin = Precision() if kind == "fp32" else MasterWeightsPrecision("bf16-true")
        strategy = fsdp2(save_distributed_checkpoint=False, **TENSOR) if ranks > 1 else "auto"
        path = tmp_path / f"{ranks}.ckpt"
        anew = at(lambda trainer, _: trainer.strategy.setup_optimizers(trainer), "on_train_batch_start", step=1)
        train(rank, ranks, strategy, steps=2, plugin=plugin, callbacks=[anew], save_to=path)

    run(0, 1)
    run_ranks(lambda rank: run(rank, 2), 2)
    theirs, ours = (optimizer_states(tmp_path / f"{ranks}.ckpt") for ranks in (1, 2))
    assert theirs
    tolerance = {"rtol": 1e-3, "atol": 1e-6} if kind == "fp32" else {"rtol": 5e-2, "atol": 4e-3}
    assert_close_by_name(ours, theirs, **tolerance)


@pytest.mark.full
def test_dropout_in_attention_differs_between_the_heads_of_ranks() -> None:
    """And only there: everything after it is the same on all ranks, and so are the common random numbers."""

    def run(rank: int) -> Any:
        module = HuggingFace("gpt2")
        masks: list[Tensor] = []
        for block in module.model.transformer.h:
            block.attn.attn_dropout.p = 0.5
            block.attn.c_proj.register_forward_pre_hook(lambda layer, args: masks.append(args[0].detach().clone()))
        trainer = quiet_trainer(devices=2, strategy=fsdp2(**TENSOR), max_steps=1)
        ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(3))
        torch.manual_seed(5)
        module.train()
        with torch.no_grad():  # both ranks have the same heads, so that only masks can differ
            for block in module.model.transformer.h:
                for parameter in (block.attn.c_attn.weight, block.attn.c_attn.bias):
                    parameter.copy_(
                        FusedOrder(2, parameter.ndim - 1).by_part(
                            parameter.unflatten(-1, (2, -1))[..., :1, :]
                            .expand(*parameter.shape[:-1], 2, -1)
                            .flatten(-2)
                        )
                    )
        trainer.fit(module, loader([[ids]]))
        return masks[0], torch.rand(3), full_weights(module)

    (mine, numbers, weights), (theirs, other_numbers, other_weights) = run_ranks(run, 2)
    assert (mine != theirs).float().mean() > 0.1
    assert torch.equal(numbers, other_numbers)
    assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())


def test_heads_that_ranks_cannot_share_are_gathered() -> None:
    gpt = model()
    whole = {"*.query_key_value": "column_gather", "*.output": "row_split", "*": "auto"}
    check_divisible(gpt, resolve_plan(gpt, whole), 4)  # what the refusal says


@pytest.mark.parametrize(("style", "bias"), [("column", Shard(0)), ("column_qkv", Shard(0)), ("row", Replicate())])
def test_the_bias_of_a_conv1d_is_split_as_its_outputs_are(style: Any, bias: Any) -> None:
    """Held whole it would be right, too, and cost a copy of its gradient and moments on each rank."""
    from transformers.pytorch_utils import Conv1D

    def run(rank: int) -> Any:
        with process_group():
            layer = Conv1D(12, 4)
            split_layer(layer, style, init_device_mesh("cpu", (2,)), shared=SharedInput())
            return layer.bias.placements == (bias,), layer.weight.placements

    by_outputs = style != "row"
    assert run_ranks(run, 2) == [(True, (Shard(1 if by_outputs else 0),))] * 2


def test_moments_of_another_shape_have_no_order_for_a_fused_matrix() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(4, 6, bias=False)})
    hold_in_rank_order(model["qkv"], 2, dim_of_weight=0)
    optimizer = torch.optim.Adafactor(model.parameters())
    convert_optimizer_states(model, [optimizer])
    model["qkv"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"Adafactor holds 'row_var' of shape \(6, 1\) .* its order is not known"):
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
