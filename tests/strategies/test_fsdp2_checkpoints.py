"""FSDP2Strategy: checkpoints in one file or in shards, and runs that go on with another number of ranks."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_runs import assert_same, assert_same_on_ranks, batches, fp16, fsdp2, full_weights, model, train
from gloo import on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import (
    WIDTH,
    Regression,
    ResumableLoader,
    adamw,
    at,
    loader,
    quiet_trainer,
    regression_batches,
    saving,
    sgd,
    shard,
)
from torch import nn

from lightning_mp import AtomicCheckpoints, OverflowMonitor
from lightning_mp.checkpoints import latest_checkpoint
from lightning_mp.strategies.fsdp2 import FSDP2Strategy
from lightning_mp.training.checkpoints.atomic import marker_path, previous_path
from lightning_mp.training.checkpoints.consolidate import consolidate_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    # A resumed run writes where the run before it wrote.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

TENSOR = {"tensor_parallel_size": 2}
KINDS = ("shards", "one file")


@pytest.fixture(scope="module")
def straight() -> dict[str, Any]:
    return train(steps=6)


def in_legs(legs: list[Any], folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """For each leg, ranks and arguments of the strategy, what its ranks have: once in shards, once in one file.

    Both in the same processes; each leg goes on from the one before, and together they make six steps.
    """

    def leg(rank: int, number: int) -> list[Any]:
        ranks, arguments = legs[number]
        return [
            train(
                rank,
                ranks,
                fsdp2(save_distributed_checkpoint=kind == "shards", **arguments),
                steps=6 * (number + 1) // len(legs),
                ckpt_path=folder / f"{kind} {number - 1}.ckpt" if number else None,
                save_to=folder / f"{kind} {number}.ckpt",
            )
            for kind in KINDS
        ]

    for number, (ranks, _) in enumerate(legs):
        by_rank = run_ranks(partial(leg, number=number), ranks)
        for kind, found in zip(KINDS, map(list, zip(*by_rank, strict=True)), strict=True):
            assert (folder / f"{kind} {number}.ckpt").is_dir() is (kind == "shards")
            assert_same_on_ranks(found)
            yield kind, found
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.full
def test_a_run_goes_on_with_another_number_of_ranks(straight: dict[str, Any], tmp_path: Path) -> None:
    """2 -> 4 -> 1 ranks, optimizer with two groups, fp16 scale: as if it had not stopped."""
    losses: dict[str, list[float]] = {kind: [] for kind in KINDS}
    last = {}
    for kind, found in in_legs([(2, {}), (4, {}), (1, {})], tmp_path):
        of_ranks = zip(*(rank["losses"] for rank in found), strict=True)
        losses[kind] += [sum(values) / len(values) for values in of_ranks]
        last[kind] = found[0]
    for kind in KINDS:
        assert losses[kind] == pytest.approx(straight["losses"], rel=1e-4), kind
        assert_same(last[kind], straight)


@pytest.mark.full
@pytest.mark.parametrize(
    "legs",
    [
        [(4, {"replicate_size": 2}), (2, TENSOR)],
        [(2, {}), (4, {"replicate_size": 2})],
        [(2, TENSOR), (4, TENSOR), (1, {})],
        [(4, TENSOR), (2, {})],
    ],
    ids=["hybrid to tensor", "shards to hybrid", "tensor to 2-D to one", "2-D to shards"],
)
def test_a_run_goes_on_with_another_kind_of_parallelism(
    legs: list[Any], straight: dict[str, Any], tmp_path: Path
) -> None:
    last = {kind: found[0] for kind, found in in_legs(legs, tmp_path)}
    for kind in KINDS:
        assert_same(last[kind], straight)


@pytest.mark.full
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
        with pytest.raises(
            ValueError, match=r"'exp_avg' of shape \(3, 5\) .* parameter of shape \(32, 16\); only state"
        ):
            train(rank, 2, fsdp2(), steps=2, ckpt_path=path)
        with pytest.raises(ValueError, match="the state of 2 optimizers, and configure_optimizers made 1"):
            train(rank, 2, fsdp2(), steps=2, ckpt_path=tmp_path / "two.ckpt")

    run_ranks(run, 2)


@pytest.mark.full
def test_what_a_broken_write_leaves_is_the_checkpoint_from_before(tmp_path: Path) -> None:
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

    def run(rank: int, sharded: bool, path: Path) -> Any:
        train(rank, 2, fsdp2(save_distributed_checkpoint=sharded), steps=2, save_to=path)
        broken = Breaks(process_group_backend="gloo", save_distributed_checkpoint=sharded)
        with pytest.raises(RuntimeError, match="planted"):
            train(rank, 2, broken, steps=4, save_to=path)
        return train(rank, 2, fsdp2(save_distributed_checkpoint=sharded), steps=6, ckpt_path=path, save_to=path)

    paths = {sharded: tmp_path / str(sharded) / "last.ckpt" for sharded in (True, False)}
    for path in paths.values():
        path.parent.mkdir()
    found = run_ranks(lambda rank: [run(rank, *kind) for kind in paths.items()], 2)
    for path, resumed in zip(paths.values(), found[0], strict=True):
        assert len(resumed["losses"]) == 4  # from step 2 on
        assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.full
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
@pytest.mark.full
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


# -- optimizers whose state is not there as a whole --------------------------------------------------------------------


@pytest.mark.full
def test_a_checkpoint_from_before_the_first_step_changes_nothing_and_goes_on(tmp_path: Path) -> None:
    """torch makes up a step to see an optimizer's state, and Adam would count it."""

    def run(rank: int) -> Any:
        straight = train(rank, 2, fsdp2(), steps=3)["weights"]
        same = []
        for sharded in (True, False):
            path = tmp_path / str(sharded)
            for arguments in ({"callbacks": [at(saving(path), "on_train_start")]}, {"ckpt_path": path}):
                strategy = fsdp2(save_distributed_checkpoint=sharded)
                weights = train(rank, 2, strategy, steps=3, **arguments)["weights"]
                same.append([torch.equal(weights[name], w) for name, w in straight.items()])
        return same

    for ranks in run_ranks(run, 2):
        assert len(ranks) == 4
        assert all(all(weights) for weights in ranks)


@pytest.mark.full
def test_a_run_goes_on_whose_steps_were_all_skipped(tmp_path: Path) -> None:
    """Its checkpoint contains no state of Adam, which is not fused: fused ones gather it in skipped steps, too."""

    def run(rank: int) -> Any:
        def leg(sharded: bool, steps: int, path: Path | None, overflows: tuple[int, ...]) -> Any:
            module = Regression(adamw, overflows=overflows)
            strategy = fsdp2("net.0", save_distributed_checkpoint=sharded)
            trainer = quiet_trainer(devices=2, strategy=strategy, plugins=[fp16()], max_steps=steps, max_epochs=-1)
            trainer.fit(module, ResumableLoader(regression_batches(6)), ckpt_path=path)
            trainer.save_checkpoint(tmp_path / f"{sharded} {steps}.ckpt")
            return full_weights(module), len(trainer.optimizers[0].state)

        straight, parameters = leg(True, 6, None, (0, 1))
        found = []
        for sharded in (True, False):
            _, with_state = leg(sharded, 2, None, (0, 1))
            resumed, _ = leg(sharded, 6, tmp_path / f"{sharded} 2.ckpt", ())
            same = all(torch.equal(resumed[name], w) for name, w in straight.items())
            found.append((with_state, parameters, same))
        return found

    assert run_ranks(run, 2) == [[(0, 4, True)] * 2] * 2


@pytest.mark.full
def test_a_model_that_has_gradients_left_gets_its_state(tmp_path: Path) -> None:
    """Of a run before, in a notebook; torch would take the optimizer for one without state."""

    def run(rank: int) -> bool:
        def fit(module: Regression, steps: int, path: Path | None = None) -> dict[str, Any]:
            trainer = quiet_trainer(devices=2, strategy=fsdp2("net.0"), max_steps=steps, max_epochs=-1)
            trainer.fit(module, ResumableLoader(regression_batches(4)), ckpt_path=path)
            trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
            return full_weights(module)

        straight, module = fit(Regression(adamw), 4), Regression(adamw)
        fit(module, 2)
        assert all(p.grad is not None for p in module.parameters())
        resumed = fit(module, 4, tmp_path / "2.ckpt")
        return all(torch.equal(resumed[name], w) for name, w in straight.items())

    assert run_ranks(run, 2) == [True, True]


class Grows(Regression):
    """A layer that takes part from the fourth micro-batch on, so that Adam knows nothing of it before."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.Adam(parameters, lr=1e-2))
        self.late = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + self.late(batch[0]).square().mean() if self.trainer.global_step >= 3 else loss


def models_own_strategy() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


class GrowsSharded(Grows):
    def configure_model(self) -> None:
        shard(self, *self.net[::2], self.late)


GROWING: dict[str, tuple[Any, type[Grows]]] = {
    "FSDP2Strategy": (lambda: fsdp2("net.0"), Grows),
    "ModelParallelStrategy": (models_own_strategy, GrowsSharded),
    "FSDP2Strategy, one file": (lambda: fsdp2("net.0", save_distributed_checkpoint=False), Grows),
}


@pytest.mark.full
def test_a_parameter_without_state_goes_on_without(tmp_path: Path) -> None:
    """The same bits as without a stop; its first step is its first, at step 4 (Kingma and Ba 2015, algorithm 1)."""

    def run(name: str) -> Any:
        make, module_class = GROWING[name]

        def legs(*steps: int) -> Any:
            path = None
            folder = tmp_path / f"{name}, {len(steps)} legs"
            for step in steps:
                module = module_class()
                keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
                trainer = quiet_trainer(
                    devices=2,
                    strategy=make(),
                    callbacks=[AtomicCheckpoints(), keep],
                    enable_checkpointing=True,
                    max_steps=step,
                    max_epochs=-1,
                )
                trainer.fit(module, ResumableLoader(regression_batches(6)), ckpt_path=path)
                path = keep.best_model_path or latest_checkpoint(folder)
            (steps_of_late,) = {int(trainer.optimizers[0].state[p]["step"]) for p in module.late.parameters()}
            return full_weights(module), steps_of_late

        straight, resumed = legs(6), legs(2, 6)
        return [torch.equal(resumed[0][name], w) for name, w in straight[0].items()], straight[1], resumed[1]

    for ranks in run_ranks(lambda rank: {name: run(name) for name in GROWING}, 2):
        for name, (same, *counted) in ranks.items():
            assert all(same), name
            assert counted == [3, 3], name


@on_ranks(run_ranks, 1)
def test_writing_in_the_background_is_refused(rank: int) -> None:
    for sharded in (True, False):
        strategy = fsdp2("net.0", save_distributed_checkpoint=sharded)
        with pytest.raises(MisconfigurationException, match="is written, and AsyncCheckpointIO would write it later"):
            quiet_trainer(devices=1, strategy=strategy, plugins=[AsyncCheckpointIO()]).fit(
                Regression(), loader(regression_batches(1))
            )


# -- what cannot be loaded, and what makes it loadable -----------------------------------------------------------------


@on_ranks(run_ranks, 2)
def test_folders_that_cannot_be_loaded_are_refused(rank: int, tmp_path: Path) -> None:
    def refused(name: str, match: str, arguments: Any = None) -> None:
        module = Regression()
        trainer = quiet_trainer(devices=2, strategy=fsdp2("net.0"), max_steps=2, max_epochs=-1)
        module.make_optimizer = arguments or (lambda parameters: sgd(parameters))  # type: ignore[assignment]
        with pytest.raises(ValueError, match=match):
            trainer.fit(module, ResumableLoader(regression_batches(4)), ckpt_path=tmp_path / name)

    def written(name: str, make: Any, **others: Any) -> None:
        module = Regression(make)
        trainer = quiet_trainer(devices=2, strategy=fsdp2("net.0"), max_steps=1, max_epochs=-1)
        trainer.fit(module, ResumableLoader(regression_batches(4)))
        trainer.save_checkpoint(tmp_path / name, **others)

    written("weights", sgd, weights_only=True)
    written("half", lambda parameters: sgd(list(parameters)[:2]))
    (tmp_path / "empty").mkdir(exist_ok=True)
    refused("weights", "contains no state of optimizers, .* save_weights_only=True .* Load its weights only")
    refused("half", r"net\.2\.bias, net\.2\.weight are only in those of configure_optimizers\. Resume with the model")
    refused("empty", r"empty is a folder without meta\.pt, .* latest_checkpoint\(folder\) finds the last complete")


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "arguments"), [(2, {}), (4, TENSOR), (4, {"replicate_size": 2})], ids=["shards", "2-D", "hybrid"]
)
def test_a_folder_becomes_a_file_for_one_device(
    ranks: int, arguments: Any, straight: dict[str, Any], tmp_path: Path
) -> None:
    """With the optimizer's two groups and everything else that a run goes on from."""
    folder, file = tmp_path / "folder.ckpt", tmp_path / "file.ckpt"
    run_ranks(lambda rank: train(rank, ranks, fsdp2(**arguments), steps=3, save_to=folder), ranks)
    assert consolidate_checkpoint(folder, file) == file
    assert_same(train(steps=6, ckpt_path=file), straight)
    alone = tmp_path / "alone.ckpt"
    train(steps=3, save_to=alone)
    ours, theirs = (torch.load(path, weights_only=True) for path in (file, alone))
    (our_state,), (their_state,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert our_state["param_groups"] == their_state["param_groups"]
    shapes = [
        {number: {name: value.shape for name, value in values.items()} for number, values in state["state"].items()}
        for state in (our_state, their_state)
    ]
    assert shapes[0] == shapes[1]
    # what losses of several ranks are means over, and the progress that the strategy attaches
    of_the_strategy = {"lightning_mp_loss_weights", "lightning_mp_loaders_made_in"}
    assert ours.keys() == theirs.keys() | of_the_strategy


def test_what_cannot_become_a_file_is_refused(tmp_path: Path) -> None:
    folder, file = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    with pytest.raises(ValueError, match=r"a\.ckpt', \.\.\.\): no folder with a meta\.pt and shards is there"):
        consolidate_checkpoint(folder, file)
    torch.save({}, file)
    with pytest.raises(ValueError, match="it is a single file already"):
        consolidate_checkpoint(file, tmp_path / "c.ckpt")
    folder.mkdir()
    (folder / "meta.pt").write_bytes(b"1")
    with pytest.raises(ValueError, match="b.ckpt'.: this exists already. Give another name, or delete it"):
        consolidate_checkpoint(folder, file)
    marker_path(folder).write_text('{"files": {"meta.pt": 1, "__0_0.distcp": 7}}')
    with pytest.raises(ValueError, match=r"files are missing or shorter than \.complete\.json says"):
        consolidate_checkpoint(folder, tmp_path / "c.ckpt")


@pytest.mark.parametrize("is_global_zero", [True, False])
def test_ranks_wait_for_each_other_before_shards_are_written_and_before_they_are_named(
    is_global_zero: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else one writes into a folder that rank 0 still clears, or an incomplete folder gets its name."""
    order: list[str] = []

    class Ordered(FSDP2Strategy):
        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return obj

        def barrier(self, name: str | None = None) -> None:
            order.append("wait")

    monkeypatch.setattr(Ordered, "is_global_zero", is_global_zero)
    monkeypatch.setattr(ModelParallelStrategy, "save_checkpoint", lambda *arguments: order.append("write"))
    for step in ("begin_checkpoint", "commit_checkpoint"):
        monkeypatch.setattr(f"lightning_mp.strategies.fsdp2.{step}", lambda path, s=step: order.append(s))
    Ordered().save_checkpoint({}, tmp_path / "x.ckpt")
    of_rank_0 = ["begin_checkpoint", "wait", "write", "wait", "commit_checkpoint", "wait"]
    assert order == [step for step in of_rank_0 if is_global_zero or not step.endswith("checkpoint")]
