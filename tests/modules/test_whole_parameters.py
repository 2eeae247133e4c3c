"""Parameters, bytes and FLOPs are counted of the whole model, under every strategy and equally on all ranks."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import on_ranks, process_group
from gloo import run_same_ranks as run_ranks
from small_models import TokenModel, fit, token_batches
from strategy_rows import STRATEGIES
from strategy_runs import Layout, share
from strategy_runs import batches as rows_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from lightning_mp import AutocastPrecision, ChinchillaBudget
from lightning_mp.callbacks.chinchilla_budget import Counted
from lightning_mp.ground.flops.chinchilla import tokens_for
from lightning_mp.ground.flops.flop_counter import count_flops
from lightning_mp.ground.flops.model_shape import MatmulParameters, matmul_parameters
from lightning_mp.ground.modules.whole_parameters import agreed_count, whole_parameters
from lightning_mp.training.gradients.sync import unsharded_gradient_bytes

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

QUICK = {"FSDP1, full shard", "FSDP2", "pipeline, GPipe"}


class Look(pl.Callback):
    """What a callback finds when the fit begins."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = trainer.strategy.model or pl_module
        self.shapes = sorted((tuple(p.shape), p.learns, p.element_bytes) for p in whole_parameters(model))
        self.products = matmul_parameters(model)


def found_under(layout: Layout, rank: int, *, scaled: bool = False) -> tuple[Any, ...]:
    """Shapes, weights of matrix products and a budget's tokens, where one layer is frozen."""
    module, look, budget = layout.model(1, plants=False), Look(), ChinchillaBudget(0.25, count=len, save=False)
    module.norm.requires_grad_(False)
    data = [share(batch, layout.data_rank(rank), layout.data_ranks, even=True) for batch in rows_of(1)]
    budget.count = lambda batch: 8 * len(batch[0])
    budget.landing = "ceil"
    strategy = layout.make()
    # Gradients reduced in fp16 want a loss scale.
    plugins = [AutocastPrecision("16-mixed")] if scaled else []
    fit(module, data, look, budget, devices=layout.ranks, strategy=strategy, plugins=plugins, steps=1)
    return look.shapes, look.products, budget.budget_tokens


@pytest.mark.filterwarnings(
    "ignore:ChinchillaBudget. the run ended after",
    "ignore:ChinchillaBudget. max_steps=1 ends before",
    "ignore:`training_step` ret",
)
@pytest.mark.parametrize(
    ("ranks", "quick"), [(2, True), *(pytest.param(ranks, False, marks=pytest.mark.full) for ranks in (2, 4))]
)
def test_a_callback_finds_the_whole_model_on_every_rank(ranks: int, quick: bool) -> None:
    """Under all strategies for so many ranks, one after the other in the same processes."""
    layouts = {name: layout for name, layout in STRATEGIES.items() if (name in QUICK, layout.ranks) == (quick, ranks)}
    assert layouts

    def found(rank: int) -> dict[str, Any]:
        return {name: found_under(layout, rank, scaled="fp16" in name) for name, layout in layouts.items()}

    expected = {name: expected_of(layout) for name, layout in layouts.items()}
    assert run_ranks(found, ranks) == [expected] * ranks


def expected_of(layout: Layout) -> tuple[Any, ...]:
    whole = layout.model(1, plants=False)
    whole.norm.requires_grad_(False)
    shapes = sorted((tuple(p.shape), p.requires_grad, 4) for p in whole.parameters())
    products = MatmulParameters(sum(p.numel() for p in whole.parameters() if p.ndim == 2), frozen=0)
    return shapes, products, tokens_for(sum(p.numel() for p in whole.parameters()), 0.25)


@pytest.mark.full
@pytest.mark.parametrize("which", ["all", "trainable", "non_embedding"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_budget_under_fsdp1_counts_what_one_process_counts(which: Counted, tied: bool) -> None:
    """187 parameters are 94 and 93 on two ranks, and padding is in a flat parameter that hides the original ones."""

    class Model(TokenModel):
        def __init__(self) -> None:
            super().__init__()
            if tied:
                self.head.weight = self.embedding.weight

    def tokens(make: Callable[[], Any], devices: int) -> tuple[int | None, int]:
        budget = ChinchillaBudget(1, parameters=which, save=False)
        fit(Model(), token_batches([5] * 48), budget, devices=devices, strategy=make(), max_epochs=-1)
        return budget.budget_tokens, budget.tokens_seen

    def on_rank(rank: int) -> list[tuple[int | None, int]]:
        kinds = [{}, {"use_orig_params": False}] + ([] if tied else [{"auto_wrap_policy": {nn.Linear}}])
        return [tokens(lambda kind=kind: CpuFsdp(**kind), 2) for kind in kinds]  # type: ignore[misc]

    one = tokens(lambda: "auto", 1)
    assert one[0] == one[1]
    for results in run_ranks(on_rank, 2):
        assert set(results) == {one}


def test_layers_that_are_made_in_configure_model_count() -> None:
    class Late(TokenModel):
        def __init__(self) -> None:
            super().__init__()
            del self.embedding, self.head

        def configure_model(self) -> None:
            if not hasattr(self, "head"):
                self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    budget = ChinchillaBudget(1, save=False)
    fit(Late(), token_batches([20] * 6), budget, max_epochs=-1)
    assert budget.budget_tokens == 187


@on_ranks(run_ranks, 2)
def test_the_inside_of_a_unit_is_refused_with_where_the_shapes_are(rank: int) -> None:
    with process_group():
        inside = nn.Sequential(nn.Linear(4, 3))
        FullyShardedDataParallel(inside, device_id=torch.device("cpu"), use_orig_params=True)
        with pytest.raises(ValueError, match="flat shards of FSDP1.*trainer.strategy.model"):
            whole_parameters(inside)
        with pytest.raises(ValueError, match="sharded parameters. Count before"):
            count_flops(inside, torch.zeros(2, 4))


def test_unsharded_bytes_of_fsdp1_are_those_of_the_whole_model() -> None:
    """Two units and parameters that do not divide by the number of ranks; frozen ones have no gradient."""

    def on_rank(rank: int) -> tuple[int, int]:
        with process_group():
            model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.LayerNorm(7).requires_grad_(False))
            wrapped = FullyShardedDataParallel(
                model,
                device_id=torch.device("cpu"),
                use_orig_params=True,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            )
            return unsharded_gradient_bytes(wrapped)

    first, second = run_ranks(on_rank, 2)
    assert first[0] == second[0] == 4 * (18 + 28)
    assert first[1] + second[1] == 4 * (18 + 28)


def test_unsharded_bytes_beside_tensor_parallelism_are_those_of_a_ranks_layers() -> None:
    def on_rank(rank: int) -> int:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        with process_group():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
            model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
            parallelize_module(model[0], mesh["tensor_parallel"], ColwiseParallel())
            fully_shard(model, mesh=mesh["data_parallel"])
            return unsharded_gradient_bytes(model)[0]

    assert run_ranks(on_rank, 4) == [4 * (8 * 16 // 2 + 16 * 4)] * 4


@on_ranks(run_ranks, 2)
def test_ranks_with_different_models_are_refused_together(rank: int) -> None:
    with process_group():
        assert agreed_count(5, torch.device("cpu"), "parameters") == 5
        with pytest.raises(ValueError, match="Ranks count different parameters: 5 on one and 6 on another"):
            agreed_count(5 + rank, torch.device("cpu"), "parameters")


def test_ddp_and_compiled_modules_are_seen_through() -> None:
    def on_rank(rank: int) -> int:
        with process_group():
            return sum(p.elements for p in whole_parameters(DistributedDataParallel(nn.Linear(4, 3))))

    assert run_ranks(on_rank, 2) == [15, 15]


def test_a_budget_of_no_parameters_is_refused() -> None:
    class Frozen(TokenModel):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)

    with pytest.raises(Exception, match=r"parameters='trainable'\) found no such parameters in Frozen"):
        fit(Frozen(), token_batches([20] * 6), ChinchillaBudget(1, parameters="trainable"))
