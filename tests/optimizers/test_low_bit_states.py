"""torchao's quantised states in checkpoints, and optimizers that masters or shards cannot work with."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsdp2_runs as runs
import pytest
import torch
import torch.distributed.tensor
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from optimizer_packages import PRECISIONS, Net, Row, batches, fit
from small_models import Regression, ResumableLoader, loader, quiet_trainer, regression_batches
from torch.utils._pytree import tree_leaves

from lightning_mp import MasterWeightsPrecision
from lightning_mp.training.optimizers.low_bit_states import from_plain_tensors, to_plain_tensors
from lightning_mp.training.precision.masters.split_parameters import SplitParameter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchao", "ignore::DeprecationWarning")

#: What each rank would import for itself.
IMPORTS = ("torchao.optim",)
ADAMW_8BIT = Row("torchao", "torchao.optim", "AdamW8bit")


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its steps, for half a minute."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resume_takes_the_quantised_states(precision: str, tmp_path: Path) -> None:
    """Lightning's own map_location is a function, which torch refuses for them."""
    straight = fit(ADAMW_8BIT, precision, batches(), save_to=tmp_path / "half.ckpt")
    [states] = torch.load(tmp_path / "half.ckpt", weights_only=True)["optimizer_states"]
    assert states["state"][0]["exp_avg"]["tensors"]["codes"].dtype == torch.uint8
    resumed = fit(ADAMW_8BIT, precision, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert all(map(torch.equal, resumed, straight))


def test_24_bit_weights_and_8_bit_moments_are_7_bytes_per_parameter() -> None:
    """A copy of 2, a rest of 1, a gradient of 2, and two moments of 1 with their scales."""
    seen = []

    class Counted(Net):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.global_step == 0:
                return
            weights: list[Any] = list(self.parameters())
            assert {type(weight) for weight in weights} == {SplitParameter}
            rooms = {loan.memory.split for loan in self.trainer.precision_plugin._compressed.loans}
            state = tree_leaves(to_plain_tensors([optimizer.state[p] for p in weights]))
            kept = [*(p.grad for p in weights), *(room.high for room in rooms), *(room.rest for room in rooms)]
            # Without torchao's tables of 256 numbers, one for each state, and counters of steps.
            kept += [t for t in state if isinstance(t, torch.Tensor) and t.shape not in ((), (256,))]
            seen.append(sum(t.nbytes for t in kept) / sum(p.numel() for p in weights))

    plugin = MasterWeightsPrecision("bf16-true", storage="24bit")
    quiet_trainer(plugins=[plugin]).fit(Counted(ADAMW_8BIT, None), ResumableLoader(batches()))
    assert len(seen) > 2
    assert seen == [pytest.approx(7 + 2 * 4 / 256, abs=0.01)] * len(seen)


def test_only_classes_of_torchao_are_made_from_a_checkpoint() -> None:
    saved = {"tensor_subclass": "os.system", "tensors": {}, "attributes": None, "size": (1,), "stride": (1,)}
    with pytest.raises(ValueError, match="'os.system', which is no tensor class of torchao"):
        from_plain_tensors({0: {"exp_avg": saved}})
    state = {0: {"step": 1, "pair": (torch.ones(1), [2])}}
    assert to_plain_tensors(state) == from_plain_tensors(state) == state


class LowBit(runs.Recorded):
    def configure_optimizers(self) -> Any:
        from torchao.optim import AdamW8bit

        return AdamW8bit(self.parameters(), lr=1e-2)


def low_bit() -> LowBit:
    torch.manual_seed(0)
    return LowBit(layers=1, heads=2, width=128, block_tokens=runs.TOKENS, vocab=runs.VOCABULARY)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp16", "masters"])
def test_sharded_quantised_states_resume_on_any_number_of_ranks(precision: str, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"

    def on_rank(rank: int, ranks: int, **arguments: Any) -> dict[str, torch.Tensor]:
        plugin = runs.fp16() if precision == "fp16" else MasterWeightsPrecision("bf16-true")
        with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
            result = runs.train(rank, ranks, runs.fsdp2(), module=low_bit(), plugin=plugin, **arguments)
        return result["weights"]

    def on_two(rank: int) -> list[dict[str, torch.Tensor]]:
        straight = on_rank(rank, 2, steps=6)
        on_rank(rank, 2, steps=3, save_to=path)
        return [straight, on_rank(rank, 2, steps=6, ckpt_path=path)]

    for straight, resumed in run_ranks(on_two, 2, imports=IMPORTS):
        assert all(torch.equal(resumed[name], value) for name, value in straight.items())
    for weights in run_ranks(lambda rank: on_rank(rank, 4, steps=6, ckpt_path=path), 4, imports=IMPORTS):
        for name, value in straight.items():
            # shards of fewer than 4,096 elements are not quantised; three steps of 0.01 lead as far as 0.03
            torch.testing.assert_close(weights[name].float(), value.float(), rtol=0, atol=8e-3)


@pytest.mark.full
def test_whole_checkpoints_of_sharded_quantised_states_are_refused_at_set_up() -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises(MisconfigurationException) as caught:
            runs.train(rank, 2, runs.fsdp2(save_distributed_checkpoint=False), module=low_bit())
        return str(caught.value)

    for message in run_ranks(on_rank, 2, imports=IMPORTS):
        assert "FSDP2Strategy(save_distributed_checkpoint=False) cannot save the quantised state of" in message
        assert "Use save_distributed_checkpoint=True" in message


class Blocked(torch.optim.SGD):
    """As distributed-shampoo does, it steps views that it made in its constructor."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        self.blocks = [{"rows": tuple(p.detach().split(4))} for group in self.param_groups for p in group["params"]]


def test_an_optimizer_that_steps_views_of_its_own_trains() -> None:
    """As distributed-shampoo: the views are of fp32 parameters."""
    module, start = Regression(Blocked), Regression(Blocked)
    quiet_trainer(plugins=[MasterWeightsPrecision("bf16-true")]).fit(module, loader(regression_batches(2)))
    assert not any(map(torch.equal, module.parameters(), start.parameters()))
