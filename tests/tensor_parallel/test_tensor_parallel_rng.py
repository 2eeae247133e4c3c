"""Random numbers under tensor parallelism: the same on all ranks, except where each rank holds a part."""

from typing import Any

import pytest
import torch
from fsdp2_runs import fsdp2
from gloo import process_group
from gloo import run_same_ranks as run_ranks
from huggingface_models import HuggingFace
from small_models import fit
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_mp.ground.core.rank_rng import RankRNG
from lightning_mp.training.tensor_parallel.apply import TensorParallelSplit
from lightning_mp.training.tensor_parallel.plan import resolve_plan

CPU = torch.device("cpu")


IDS = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(3))


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
        fit(module, [[IDS]], devices=2, strategy=fsdp2(tensor_parallel_size=2), max_steps=1)
        return module.masks[0]

    mine, theirs = run_ranks(run, 2)
    assert torch.equal(mine, theirs)


@pytest.mark.full
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


def test_an_activation_checkpoint_that_restores_the_common_sequence_gets_the_same_masks() -> None:
    """Also the second time in a row: a seed that is drawn again starts the rank's sequence anew."""
    torch.manual_seed(3)
    rng, state, drawn = RankRNG(1), torch.get_rng_state(), []
    for _ in range(3):
        torch.set_rng_state(state)
        with rng.drawn(torch.device("cpu")):
            drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1] == drawn[2]
    with rng.drawn(torch.device("cpu")):
        assert float(torch.rand(())) != drawn[0]


def test_numbers_of_a_rank_are_not_those_that_the_process_draws_from_the_same_seed():
    torch.manual_seed(5)
    common = torch.rand(4)
    with RankRNG(0, seed=lambda: 5).drawn(torch.device("cpu")):
        own = torch.rand(4)
    assert not torch.equal(common, own)
