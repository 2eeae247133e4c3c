"""Float8Precision under tensor parallelism: layers and runs against one process."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchao.float8  # noqa: F401  # once, before the ranks are forked
from fsdp2_runs import Recorded, assert_same_on_ranks, fsdp2, full_weights
from gloo import FLOAT8, on_ranks, process_group
from gloo import run_same_ranks as run_any_ranks
from lightning.pytorch.callbacks import Callback
from small_models import ResumableLoader, at, loader, plant_inf, quiet_trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from wire_counter import CollectiveCounter

from lightning_mp import AccumulationScheduler, ActivationCheckpointing, Float8Precision, OverflowMonitor
from lightning_mp.training.policy.float8_layers import Float8Layer, choose_float8_layers
from lightning_mp.training.precision.fp8.conversion import RECIPES, convert_to_float8, float8_config
from lightning_mp.training.tensor_parallel.layers import SharedInput, split_layer

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.timeout(400),
]

run_ranks = partial(run_any_ranks, imports=FLOAT8)

GLOBS = {"*.mlp.up": "column", "*.mlp.down": "row"}


def passed(layer: nn.Linear, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(gradient)
    assert x.grad is not None
    return [output.detach(), x.grad]


def float8_linear(recipe: str, mesh: Any = None, style: Any = None) -> nn.Linear:
    torch.manual_seed(1)
    layer = nn.Linear(32, 64).bfloat16()
    if mesh is not None:
        split_layer(layer, style, mesh, shared=SharedInput())
    convert_to_float8([Float8Layer("", layer, None)], float8_config(recipe, emulate=True))
    return layer


@pytest.mark.full
@on_ranks(run_ranks, 2)
def test_each_rank_rounds_with_the_factors_of_the_whole(rank: int) -> None:
    """Bit for bit, but for what is a sum over ranks: its two terms are rounded to bf16 before they are added up."""
    generator = torch.Generator().manual_seed(2)
    # Parts of different size, so that factors of parts would be others.
    x = torch.randn(2, 8, 32, generator=generator).mul(torch.linspace(0.1, 9, 32)).bfloat16()
    gradient = torch.randn(2, 8, 64, generator=generator).mul(torch.linspace(9, 0.1, 64)).bfloat16()
    with process_group():
        mesh = init_device_mesh("cpu", (2,))
        for recipe in RECIPES:
            whole = float8_linear(recipe)
            output, of_input = passed(whole, x, gradient)
            assert whole.weight.grad is not None
            for style in ("column", "row"):
                split = float8_linear(recipe, mesh, style)
                own_x = x if style == "column" else x.chunk(2, -1)[rank]
                own_gradient = gradient.chunk(2, -1)[rank] if style == "column" else gradient
                ours, our_input = passed(split, own_x, own_gradient)
                exact, summed = (ours, our_input) if style == "column" else (our_input, ours)
                its, its_sum = (output, of_input) if style == "column" else (of_input, output)
                assert torch.equal(exact, its.chunk(2, -1)[rank]), (recipe, style)
                torch.testing.assert_close(summed, its_sum, rtol=2**-7, atol=2**-7 * its_sum.abs().max().item())
                assert torch.equal(split.weight.grad.full_tensor(), whole.weight.grad), (recipe, style)


def test_a_layer_whose_part_is_no_multiple_of_16_stays_in_bf16() -> None:
    """A device's fp8 product would refuse it, at the first step."""

    def run(rank: int) -> list[str | None]:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(64, 16), nn.Linear(16, 16))
        with process_group():
            mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("data_parallel", "tensor_parallel"))
            for layer, style in ((model[0], "column"), (model[1], "row"), (model[3], "row")):
                split_layer(layer, style, mesh["tensor_parallel"], shared=SharedInput())
            return [layer.skipped_because for layer in choose_float8_layers(model, skip_first_and_last=False)]

    assert run_ranks(run, 4)[0] == [
        "a rank's part of out_features is 8, not a multiple of 16",
        "a rank's part of in_features is 8, not a multiple of 16",
        None,
        None,
        None,
    ]


@pytest.mark.full
def test_factors_are_the_only_thing_more_that_goes_over_the_wire() -> None:
    def run(rank: int) -> Any:
        with process_group():
            layer = float8_linear("rowwise", init_device_mesh("cpu", (2,)), "row")
            x = torch.ones(2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
            with CollectiveCounter() as counter:
                layer(x).float().sum().backward()
            return sorted((seen.name, seen.payload_bytes) for seen in counter.seen)

    # 16 rows of the input and 64 of the weight, in float64; then the output, 16 rows of 64 in bf16.
    assert run_ranks(run, 2)[0] == [("all_reduce", 8 * 16), ("all_reduce", 8 * 64), ("all_reduce", 2 * 16 * 64)]


UP = "model.blocks.1.mlp.up.weight"


def overflow() -> Callback:
    return at(plant_inf(UP), "on_after_backward", rank=-1, step=1)


def train(rank: int, ranks: int, *, steps: int = 4, callbacks: Any = (), **arguments: Any) -> dict[str, Any]:
    """Wide enough for parts of 16; fp8 in every layer but the head, which shares the table's weights."""
    torch.manual_seed(0)
    module = Recorded(layers=2, heads=2, width=32, block_tokens=8, vocab=64, learning_rate=1e-2, warmup_steps=1)
    strategy = arguments.pop("strategy", "auto")
    save_to, ckpt_path = arguments.pop("save_to", None), arguments.pop("ckpt_path", None)
    before, monitor = full_weights(module), OverflowMonitor()
    plugin = Float8Precision(
        arguments.pop("recipe", "rowwise"), emulate=True, skip_first_and_last=False, skip_small=False
    )
    trainer = quiet_trainer(
        devices=ranks,
        strategy=strategy,
        plugins=[plugin],
        callbacks=[monitor, *callbacks],
        max_epochs=-1,
        max_steps=steps,
        gradient_clip_val=0.5,
        **arguments,
    )
    ids = torch.randint(64, (6, 4, 9), generator=torch.Generator().manual_seed(3))
    rows = [[each[:, :-1], each[:, 1:]] for each in ids[:, rank // 2 :: max(ranks // 2, 1)]]
    trainer.fit(module, ResumableLoader(rows), loader(rows[:1]), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {
        "norm": monitor.grad_norm,
        "skipped": monitor.skipped_steps,
        "scale": None,
        "steps": trainer.global_step,
        "weights": full_weights(module),
        "before": before,
        "in fp8": sum(layer.skipped_because is None for layer in plugin.layers),
    }


alone = cache(partial(train, 0, 1))

CASES = [*((recipe, 2) for recipe in RECIPES), ("rowwise", 4)]

Runs = Callable[[int], list[dict[str, Any]]]


def windows() -> list[Callback]:
    return [AccumulationScheduler({0: 2}), ActivationCheckpointing("Block")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs on a number of ranks, one after the other in the same processes; of each rank, by name."""

    @cache
    def on_ranks(ranks: int) -> list[dict[str, Any]]:
        checkpoint = tmp_path_factory.mktemp("runs") / "last.ckpt"
        # each plan and each recipe
        plans: list[Any] = ["auto", "auto_sequence", GLOBS] if ranks == 2 else ["auto_sequence"]
        recipes = [recipe for recipe, number in CASES if number == ranks]
        cases = dict(zip(recipes, plans, strict=True))

        def run(rank: int) -> dict[str, Any]:
            def split(plan: Any = "auto", **arguments: Any) -> dict[str, Any]:
                strategy = fsdp2(
                    tensor_parallel_size=2, tensor_parallel_plan=plan, save_distributed_checkpoint=ranks == 4
                )
                return train(rank, ranks, strategy=strategy, **arguments)

            found: dict[str, Any] = {recipe: split(plan, recipe=recipe) for recipe, plan in cases.items()}
            if ranks == 4:
                found["windows"] = split("auto_sequence", callbacks=windows(), steps=3)
            found["straight"] = split(callbacks=[overflow()])
            split(steps=2, save_to=checkpoint, callbacks=[overflow()])
            dist.barrier()
            found["resumed"] = split(ckpt_path=checkpoint)
            return found

        return run_ranks(run, ranks, timeout_seconds=300)

    return on_ranks


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "ranks"), CASES)
def test_it_equals_one_process(recipe: str, ranks: int, runs: Runs) -> None:
    """Up to values that fall to the other side between two fp8 numbers, clipped by norm, relative to the way made."""
    check([of_rank[recipe] for of_rank in runs(ranks)], alone(recipe=recipe))


@pytest.mark.full
def test_windows_and_recomputed_blocks_equal_one_process(runs: Runs) -> None:
    check([of_rank["windows"] for of_rank in runs(4)], train(0, 1, callbacks=windows(), steps=3))


def check(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert_same_on_ranks(found)
    assert found[0]["in fp8"] == alone["in fp8"] == 8
    assert found[0]["norm"] == pytest.approx(alone["norm"], rel=2**-4)
    assert (found[0]["skipped"], found[0]["steps"]) == (alone["skipped"], alone["steps"])
    ways = {name: (value - alone["before"][name]).square().mean().sqrt() for name, value in alone["weights"].items()}
    usual = torch.stack(list(ways.values())).mean()
    for name, value in alone["weights"].items():
        error = (found[0]["weights"][name] - value).square().mean().sqrt()
        assert error < 2**-3 * max(ways[name], usual), name


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_overflow_on_one_rank_skips_on_all(ranks: int, runs: Runs) -> None:
    found = [of_rank["straight"] for of_rank in runs(ranks)]
    assert_same_on_ranks(found)
    assert (found[0]["skipped"], found[0]["steps"]) == (1, 4)
    assert all(value.isfinite().all() for value in found[0]["weights"].values())


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_is_resumed_with_the_same_bits(ranks: int, runs: Runs) -> None:
    for found in runs(ranks):
        straight, resumed = (found[name]["weights"] for name in ("straight", "resumed"))
        assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
