"""torch.compile under FSDP2Strategy and tensor parallelism, against one process that is not compiled."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_runs import assert_same, assert_same_on_ranks, fsdp2, model, train
from gloo import COMPILER
from gloo import run_ranks as run_any_ranks
from lightning.pytorch.callbacks import Callback
from small_models import at, plant_inf, saving

from lightning_mp import AccumulationScheduler, ActivationCheckpointing, AutocastPrecision, MasterWeightsPrecision

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler looks there
]

run_ranks = partial(run_any_ranks, timeout_seconds=480, imports=COMPILER)

SEQUENCE = {"tensor_parallel_size": 2, "tensor_parallel_plan": "auto_sequence"}
TENSOR = {"tensor_parallel_size": 2}


def blocks(module: Any) -> None:
    for block in module.model.blocks:
        block.compile(backend="aot_eager")


def whole(module: Any) -> None:
    module.model.compile(backend="aot_eager")


def lightning_module(module: Any) -> None:
    module.compile(backend="aot_eager")


def bf16() -> AutocastPrecision:
    return AutocastPrecision("bf16-mixed")


def compiled(
    how: Callable[[Any], None], rank: int, ranks: int, arguments: dict[str, Any], *, validate: bool = False, **more: Any
) -> Any:
    """A validation before training is compiled for itself, which takes as long as the training."""
    module = model()
    how(module)
    more["num_sanity_val_steps"] = int(validate)
    return train(rank, ranks, fsdp2(**arguments), module=module, gradient_clip_val=0.5, **more)


@pytest.mark.parametrize(("how", "ranks", "arguments"), [(blocks, 2, {}), (whole, 4, TENSOR)])
def test_it_equals_one_process(how: Any, ranks: int, arguments: dict[str, Any]) -> None:
    """Also where the table of embeddings and the head are in the compiled part; clipped by norm."""

    def run(rank: int) -> Any:
        return compiled(how, rank, ranks, arguments, plugin=bf16(), steps=3)

    found = run_ranks(run, ranks)
    assert_same_on_ranks(found)
    alone = train(plugin=bf16(), steps=3, gradient_clip_val=0.5)
    assert_same(found[0], alone, atol=2e-3)


def test_master_weights_equal_those_that_are_not_compiled() -> None:
    def run(rank: int) -> Any:
        plugin = MasterWeightsPrecision("bf16-true")
        plain = train(rank, 2, fsdp2(**TENSOR), plugin=plugin, gradient_clip_val=0.5, steps=3)
        return compiled(blocks, rank, 2, TENSOR, plugin=MasterWeightsPrecision("bf16-true"), steps=3), plain

    found = run_ranks(run, 2)
    assert_same_on_ranks([ours for ours, _ in found])
    assert_same(*found[0], atol=2**-8)


def test_recomputed_blocks_and_windows_equal_one_process() -> None:
    """The compiler gives up at FSDP2's hooks inside of blocks, and the second run has the first one's attention."""

    def callbacks() -> list[Callback]:
        return [ActivationCheckpointing("Block"), AccumulationScheduler({0: 2})]

    def run(rank: int) -> Any:
        return compiled(blocks, rank, 2, SEQUENCE, plugin=bf16(), steps=2, callbacks=callbacks())

    found = run_ranks(run, 2)
    assert_same_on_ranks(found)
    alone = train(plugin=bf16(), steps=2, gradient_clip_val=0.5, callbacks=callbacks())
    assert_same(found[0], alone, atol=2e-3)


def overflow() -> Callback:
    return at(plant_inf("model.blocks.1.mlp.up.weight"), "on_after_backward", rank=-1, step=1)


def test_an_overflow_on_one_rank_skips_on_all() -> None:
    """Where the LightningModule is what is compiled, with a validation; the other steps equal those of one process."""
    found = run_ranks(
        lambda rank: compiled(lightning_module, rank, 2, TENSOR, validate=True, callbacks=[overflow()]), 2
    )
    assert_same_on_ranks(found)
    assert (found[0]["skipped"], found[0]["scale"], found[0]["steps"]) == (1, 512.0, 4)
    assert_same(found[0], train(gradient_clip_val=0.5, callbacks=[overflow()]), atol=3e-4)


def test_a_run_equals_one_process_and_is_resumed_with_the_same_bits(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        saves = at(saving(tmp_path / "middle.ckpt"), step=2)
        straight = compiled(whole, rank, 2, SEQUENCE, callbacks=[saves])
        resumed = compiled(whole, rank, 2, SEQUENCE, ckpt_path=tmp_path / "middle.ckpt")
        assert len(resumed["losses"]) == 2
        return straight, resumed["weights"]

    found = run_ranks(run, 2)
    for straight, resumed in found:
        assert all(torch.equal(value, resumed[name]) for name, value in straight["weights"].items())
    assert_same_on_ranks([straight for straight, _ in found])
    assert_same(found[0][0], train(gradient_clip_val=0.5), atol=3e-4)
