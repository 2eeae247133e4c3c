"""Ranks that run different sharding units are told so before a step is made with each other's weights."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cpu_fsdp import CpuFsdp
from fsdp2_runs import fsdp2, full_weights
from gloo import process_group
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import fit, loader, quiet_trainer, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from wire_counter import CollectiveCounter

from lightning_mp import AutocastPrecision, MasterWeightsPrecision, OverflowMonitor
from lightning_mp.training.gradients.ranks_alike import AgreedUnits

WIDTH = 8


class Block(nn.Linear):
    """A class of its own, so that it can be named as a unit."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Pair(nn.Module):
    """Two experts in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](x)


class Routed(pl.LightningModule):
    """``how`` says what differs between ranks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.pair = Pair()
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, *others = self.blocks
        x = first(batch)
        if self.how == "units":
            x = others[self.global_rank](x)
        elif self.how == "order":
            for block in others[:: -1 if self.global_rank else 1]:
                x = block(x)
        elif self.how == "the batch":
            x = others[batch_idx % 3](x)
        x = self.pair(x, self.global_rank if self.how == "parameters" else 0)
        return x.float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stock(Routed):
    """As Lightning's own strategy wants it."""

    def configure_model(self) -> None:
        shard(self, *self.blocks, self.pair)


def strategy(kind: str) -> Any:
    if kind == "FSDP2Strategy":
        return fsdp2({Block, Pair})
    if kind == "FSDPStrategy":
        return CpuFsdp(auto_wrap_policy={Block, Pair})
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


def batches(rank: int) -> list[Tensor]:
    return list(torch.randn(6, 4, WIDTH, generator=torch.Generator().manual_seed(rank)))


def refused(rank: int, kind: str, how: str, ours: str) -> tuple[str, bool]:
    """The message, and whether the weights are as they were."""
    module = (Stock if kind == "ModelParallelStrategy" else Routed)(how)
    before = full_weights(module)
    trainer = quiet_trainer(
        devices=2,
        strategy=strategy(kind),
        plugins=[AutocastPrecision("bf16-mixed")] * (ours == "plugin")
        + [MasterWeightsPrecision("bf16-true")] * (ours == "masters"),
        callbacks=[OverflowMonitor()] * (ours == "monitor"),
    )
    with pytest.raises(MisconfigurationException, match="ranks ran different layers") as error:
        trainer.fit(module, loader(batches(rank)))
    if kind == "FSDPStrategy":  # its weights are in another form by now
        return str(error.value), trainer.global_step == 0
    after = full_weights(module)
    return str(error.value), all(torch.equal(before[n].to(after[n].dtype), after[n]) for n in before)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("kind", "how", "ours"),
    [
        ("FSDP2Strategy", "units", "nothing"),
        ("FSDP2Strategy", "order", "plugin"),
        ("FSDP2Strategy", "parameters", "nothing"),
        ("FSDP2Strategy", "parameters", "masters"),
        ("FSDPStrategy", "units", "plugin"),
        ("FSDPStrategy", "order", "monitor"),
        ("ModelParallelStrategy", "units", "monitor"),
    ],
)
def test_ranks_that_run_different_units_are_told_before_the_first_step(kind: str, how: str, ours: str) -> None:
    (first, untouched), (second, untouched_too) = run_ranks(partial(refused, kind=kind, how=how, ours=ours), 2)
    assert untouched
    assert untouched_too
    assert "Choose layers from values that are equal on all ranks" in first
    if how == "units":
        assert "Rank 0 ran" in first
        assert "blocks.1" in first
        assert "blocks.2" not in first
        assert "Rank 1 ran" in second
        assert "blocks.2" in second
        assert "blocks.1" not in second


def trained(rank: int, how: str) -> list[Any]:
    trainer = quiet_trainer(devices=2, strategy=fsdp2({Block, Pair}), plugins=[AutocastPrecision("bf16-mixed")])
    trainer.fit(Routed(how), loader(batches(rank)))
    return [trainer.global_step]


def test_units_that_change_from_batch_to_batch_on_all_ranks_alike_are_fine() -> None:
    assert run_ranks(partial(trained, how="the batch"), 2) == [[6], [6]]


class CalledAgain(pl.LightningModule):
    """Rank 1 calls itself twice; its weights are gathered once for the whole step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for _ in range(1 + self.global_rank):
            batch = self(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def called_again(rank: int) -> int:
    trainer = fit(CalledAgain(), batches(rank), OverflowMonitor(), devices=2, strategy=fsdp2())
    return trainer.global_step


def test_calls_that_gather_nothing_are_nobodys_business() -> None:
    assert run_ranks(called_again, 2) == [6, 6]


def by_hand(rank: int, steps: int, waits: bool, read_state: bool, made_later: bool = False) -> int:
    """Ranks differ in the first step; returns how many steps were made before they were told."""
    with process_group():
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watching = AgreedUnits(model, torch.device("cpu"), waits=waits).attach([] if made_later else [optimizer])
        made = 0
        try:
            for step in range(steps):
                model[rank if step == 0 else 0](torch.ones(2, 4)).sum().backward()
                watching.compare(optimizer)
                optimizer.step()
                optimizer.zero_grad()
                assert len(optimizer._optimizer_state_dict_pre_hooks) == 1  # not one more with each step
                made += 1
            if read_state:
                optimizer.state_dict()
        except MisconfigurationException:
            return made
        finally:
            watching.detach()
        return -1


@pytest.mark.parametrize(
    ("waits", "steps", "read_state", "made"), [(True, 2, False, 0), (False, 2, False, 1), (False, 1, True, 1)]
)
@pytest.mark.parametrize("made_later", [False, True], ids=["from the start", "made inside of the fit"])
def test_where_a_wait_would_cost_ranks_are_told_at_the_next_step_and_before_a_checkpoint(
    waits: bool, steps: int, read_state: bool, made: int, made_later: bool
) -> None:
    run = partial(by_hand, steps=steps, waits=waits, read_state=read_state, made_later=made_later)
    assert run_ranks(run, 2) == [made, made]


class Count(pl.Callback):
    """Collective operations from one batch's end to the next."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.counter = CollectiveCounter()
        self.counter.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counter.__exit__(None, None, None)
        small = [operation for operation in self.counter.seen if operation.name == "all_reduce"]
        self.seen.append(len(small))


def counted(rank: int, accumulate: int) -> list[int]:
    count = Count()
    trainer = quiet_trainer(
        devices=2, strategy=fsdp2({Block, Pair}), callbacks=[count], accumulate_grad_batches=accumulate
    )
    trainer.fit(Routed("the batch"), loader(batches(rank)))
    return count.seen


class Copies(Routed):
    """Ranks 0 and 1 hold one copy, 2 and 3 the other."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        copy = self.global_rank // 2
        x = self.blocks[1 + copy if self.how == "units" else 1](batch)
        return self.pair(x, copy if self.how == "parameters" else 0).float().square().mean()


def beside_tensor_parallelism(rank: int, how: str) -> tuple[int, str]:
    """Two copies of a model divided in two: each copy's ranks run the same, the copies do not."""

    trainer = quiet_trainer(
        devices=4,
        strategy=fsdp2({Block, Pair}, tensor_parallel_size=2, tensor_parallel_plan={"blocks.0": "column_gather"}),
        plugins=[AutocastPrecision("bf16-mixed")],
    )
    try:
        trainer.fit(Copies(how), loader(batches(rank // 2)))
    except MisconfigurationException as error:
        return trainer.global_step, str(error)
    return trainer.global_step, ""


@pytest.mark.full
@pytest.mark.parametrize("how", ["units", "parameters", "nothing"])
def test_copies_beside_tensor_parallelism_compare_among_themselves(how: str) -> None:
    for steps, message in run_ranks(partial(beside_tensor_parallelism, how=how), 4):
        assert steps == (6 if how == "nothing" else 0)
        assert ("ranks ran different layers" in message) == (how != "nothing")


def experts(rank: int, used: dict[int, int]) -> bool:
    """Ranks 0 and 2 hold experts of their own, as ranks 1 and 3 do: whether this rank is told."""
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "expert"))
        model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        fully_shard(model[0], mesh=init_device_mesh("cpu", (4,)))
        for expert in model[1:]:
            fully_shard(expert, mesh=mesh["copy"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watching = AgreedUnits.of(model, [optimizer], torch.device("cpu"))
        assert watching is not None
        x = model[0](torch.ones(2, 4))
        if rank in used:
            x = model[used[rank]](x)
        x.sum().backward()
        try:
            watching.compare(optimizer)
        except MisconfigurationException:
            return True
        finally:
            watching.detach()
        return False


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("used", "told"), [({1: 2, 3: 2}, []), ({0: 1, 2: 1, 1: 1, 3: 2}, [1, 3])])
def test_ranks_of_an_expert_compare_among_themselves(used: dict[int, int], told: list[int]) -> None:
    assert run_ranks(partial(experts, used=used), 4) == [rank in told for rank in range(4)]


def test_it_costs_one_small_reduction_per_step() -> None:
    assert run_ranks(partial(counted, accumulate=2), 2)[0] == [0, 1] * 3
