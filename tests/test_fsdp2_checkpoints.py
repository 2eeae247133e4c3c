"""FSDP2Strategy: checkpoints in one file or in shards, and runs that go on with another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_runs import assert_same, assert_same_on_ranks, batches, fp16, fsdp2, full_weights, model, train
from gloo import run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from small_models import Regression, ResumableLoader, loader, quiet_trainer, regression_batches, sgd

from lightning_mp import AtomicCheckpoints, MasterWeightsPrecision, OverflowMonitor, latest_checkpoint
from lightning_mp.faults.atomic_checkpoint import previous_path
from lightning_mp.strategies.fsdp2 import FSDP2Strategy

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

TENSOR = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def straight() -> dict[str, Any]:
    return train(steps=6)


@pytest.mark.parametrize("sharded", [True, False], ids=["shards", "one-file"])
def test_a_run_goes_on_with_another_number_of_ranks(sharded: bool, straight: dict[str, Any], tmp_path: Path) -> None:
    """2 -> 4 -> 1 ranks, optimizer with two groups, fp16 scale: as if it had not stopped."""
    before: Any = None
    losses: list[list[float]] = []
    for leg, ranks in enumerate((2, 4, 1)):
        to = tmp_path / f"{leg}.ckpt"

        def leg_of(rank: int, ranks: int = ranks, leg: int = leg, to: Path = to, before: Any = before) -> Any:
            strategy = fsdp2(save_distributed_checkpoint=sharded)
            return train(rank, ranks, strategy, steps=2 * (leg + 1), ckpt_path=before, save_to=to)

        found = run_ranks(leg_of, ranks)
        assert_same_on_ranks(found)
        assert to.is_dir() is sharded
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
        losses += [list(values) for values in zip(*(rank["losses"] for rank in found), strict=True)]
        before = to
    assert [sum(values) / len(values) for values in losses] == pytest.approx(straight["losses"], rel=1e-4)
    assert_same(found[0], straight)


@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.full)], ids=["shards", "one-file"])
@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([(2, TENSOR), (2, {})], marks=pytest.mark.full),
        pytest.param([(4, TENSOR), (2, TENSOR)], marks=pytest.mark.full),
        pytest.param([(2, {}), (4, {"replicate_size": 2})], marks=pytest.mark.full),
        pytest.param([(4, TENSOR), (1, {})], marks=pytest.mark.full),
    ],
    ids=["tensor to shards", "2-D to tensor", "shards to hybrid", "2-D to one"],
)
def test_a_run_goes_on_with_another_kind_of_parallelism(
    legs: list[Any], sharded: bool, straight: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "between.ckpt"

    def leg(rank: int, number: int) -> Any:
        ranks, arguments = legs[number]
        where = {"save_to": path, "steps": 3} if number == 0 else {"ckpt_path": path, "steps": 6}
        return train(rank, ranks, fsdp2(save_distributed_checkpoint=sharded, **arguments), **where)

    run_ranks(lambda rank: leg(rank, 0), legs[0][0])
    found = run_ranks(lambda rank: leg(rank, 1), legs[1][0])
    assert_same_on_ranks(found)
    assert_same(found[0], straight)


def test_one_file_goes_to_one_device_and_back(straight: dict[str, Any], tmp_path: Path) -> None:
    """The optimizer has norms in a second group, so its order is not that of the model."""
    alone, sharded = tmp_path / "alone.ckpt", tmp_path / "sharded.ckpt"
    train(steps=2, save_to=alone)

    def middle(rank: int) -> Any:
        strategy = fsdp2(save_distributed_checkpoint=False)
        return train(rank, 2, strategy, steps=4, ckpt_path=alone, save_to=sharded)

    run_ranks(middle, 2)
    assert_same(train(steps=6, ckpt_path=sharded), straight)
    ours, theirs = (torch.load(path, weights_only=True) for path in (sharded, alone))
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    (our_state,), (their_state,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert [group["params"] for group in our_state["param_groups"]] == [
        group["params"] for group in their_state["param_groups"]
    ]
    for number, values in their_state["state"].items():
        assert {name: value.shape for name, value in our_state["state"][number].items()} == {
            name: value.shape for name, value in values.items()
        }


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    """A fused kernel would read beyond the end of a tensor that is too small."""
    path = tmp_path / "a.ckpt"
    train(steps=1, save_to=path)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(3, 5)
    torch.save(checkpoint, path)
    more = {**checkpoint, "optimizer_states": checkpoint["optimizer_states"] * 2}
    torch.save(more, tmp_path / "two.ckpt")

    def run(rank: int) -> None:
        with pytest.raises(ValueError, match=r"'exp_avg' of shape \(3, 5\) .* parameter of shape \(32, 16\), and only"):
            train(rank, 2, fsdp2(), steps=2, ckpt_path=path)
        with pytest.raises(ValueError, match="the state of 2 optimizers, and configure_optimizers made 1"):
            train(rank, 2, fsdp2(), steps=2, ckpt_path=tmp_path / "two.ckpt")

    run_ranks(run, 2)


class PlainSGD(Regression):
    def __init__(self) -> None:
        super().__init__(sgd)


@pytest.mark.parametrize("sharded", [pytest.param(True, marks=pytest.mark.full), False], ids=["shards", "one-file"])
def test_an_optimizer_without_state_goes_on(sharded: bool, tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        for steps, path in ((2, None), (4, tmp_path / "a.ckpt")):
            module = PlainSGD()
            strategy = fsdp2("net.0", save_distributed_checkpoint=sharded)
            trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=steps, max_epochs=-1)
            trainer.fit(module, ResumableLoader(regression_batches(4)), ckpt_path=path)
            trainer.save_checkpoint(tmp_path / "a.ckpt")
        return full_weights(module)

    alone = PlainSGD()
    quiet_trainer().fit(alone, loader(regression_batches(4)))
    for weights in run_ranks(run, 2):
        for name, value in full_weights(alone).items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sharded", "storage"),
    [
        (True, "remainder"),
        pytest.param(False, "fp32", marks=pytest.mark.full),
        pytest.param(True, "fp32", marks=pytest.mark.full),
        pytest.param(False, "remainder", marks=pytest.mark.full),
    ],
)
def test_masters_go_on(sharded: bool, storage: Any, tmp_path: Path) -> None:
    """bf16 weights and their fp32 masters: the same weights as without a stop, to the last bit."""

    def run(rank: int, legs: tuple[int, ...]) -> Any:
        path = None
        for steps in legs:
            module = Regression()
            trainer = quiet_trainer(
                devices=2,
                strategy=fsdp2("net.0", save_distributed_checkpoint=sharded),
                plugins=[MasterWeightsPrecision("bf16-true", storage=storage)],
                max_steps=steps,
                max_epochs=-1,
            )
            trainer.fit(module, ResumableLoader(regression_batches(6)), ckpt_path=path)
            path = tmp_path / f"{steps}.ckpt"
            trainer.save_checkpoint(path)
        return full_weights(module)

    straight = run_ranks(lambda rank: run(rank, (6,)), 2)[0]
    for weights in run_ranks(lambda rank: run(rank, (3, 6)), 2):
        for name, value in straight.items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.full)], ids=["shards", "one-file"])
def test_what_a_broken_write_leaves_is_the_checkpoint_from_before(sharded: bool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"

    class Breaks(FSDP2Strategy):
        waits: int | None = None

        def save_checkpoint(self, *arguments: Any, **others: Any) -> None:
            self.waits = 0
            super().save_checkpoint(*arguments, **others)

        def barrier(self, name: str | None = None) -> None:
            if self.waits is not None:
                self.waits += 1
                if self.waits == 2:
                    raise RuntimeError("planted: the ranks died after their files were written")
            super().barrier(name)

    def run(rank: int) -> Any:
        train(rank, 2, fsdp2(save_distributed_checkpoint=sharded), steps=2, save_to=path)
        broken = Breaks(process_group_backend="gloo", save_distributed_checkpoint=sharded)
        with pytest.raises(RuntimeError, match="planted"):
            train(rank, 2, broken, steps=4, save_to=path)
        return train(rank, 2, fsdp2(save_distributed_checkpoint=sharded), steps=6, ckpt_path=path, save_to=path)

    found = run_ranks(run, 2)
    assert len(found[0]["losses"]) == 4  # from step 2 on
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_model_checkpoint_keeps_the_last_ones(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
        train(rank, 2, fsdp2(), steps=4, callbacks=[keep], enable_checkpointing=True)
        dist.barrier()
        return sorted(entry.name for entry in tmp_path.iterdir())

    assert run_ranks(run, 2) == [["step=3.ckpt", "step=4.ckpt"]] * 2


def test_weights_are_validated_without_an_optimizer_from_what_an_ended_run_left(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def run(rank: int) -> Any:
        trained = train(rank, 2, fsdp2(), steps=2, save_to=path)["weights"]
        dist.barrier()
        if rank == 0:  # as a run that is ended while one checkpoint takes the place of another leaves it
            path.rename(previous_path(path))
        dist.barrier()
        module = model()
        trainer = quiet_trainer(devices=2, strategy=fsdp2(), plugins=[fp16()], callbacks=[OverflowMonitor()])
        trainer.validate(module, loader(batches(1)), ckpt_path=path, verbose=False)
        return all(torch.equal(value, trained[name]) for name, value in full_weights(module).items())

    assert run_ranks(run, 2) == [True, True]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
@pytest.mark.parametrize("callbacks", [list, lambda: [AtomicCheckpoints()]], ids=["alone", "with AtomicCheckpoints"])
def test_the_latest_checkpoint_is_found_again(callbacks: Any, tmp_path: Path) -> None:
    """The folders are marked as complete, whether or not the callback for other strategies is there, too."""

    def run(rank: int) -> Any:
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        train(rank, 2, fsdp2(), steps=3, callbacks=[keep, *callbacks()], enable_checkpointing=True)
        dist.barrier()
        found = latest_checkpoint(tmp_path)
        assert found is not None
        return found.name, len(train(rank, 2, fsdp2(), steps=5, ckpt_path=found)["losses"])

    assert run_ranks(run, 2) == [("step=3.ckpt", 2)] * 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
