"""Checkpoints appear in one step, synced before they are renamed; the latest complete one is found."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import small_models
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, at, loader, quiet_trainer, raising, regression_batches, weights

from lightning_mp.callbacks.atomic_checkpoints import AtomicCheckpoints
from lightning_mp.training.checkpoints.atomic import (
    AtomicCheckpointIO,
    begin_checkpoint,
    commit_checkpoint,
    is_complete,
    marker_path,
    previous_path,
    recover_checkpoint,
    remove_checkpoint,
    temporary_path,
)
from lightning_mp.training.checkpoints.latest import latest_checkpoint

BATCHES = regression_batches(4)


def write_file(path: Path, step: int = 0) -> None:
    torch.save({"global_step": step}, path)


def write_directory(path: Path, step: int = 0) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "shard").write_bytes(b"\0" * 100)
    torch.save({"global_step": step}, path / "meta.pt")


def save(path: Path, write: Callable[[Path, int], None], step: int = 0) -> None:
    begin_checkpoint(path)
    write(temporary_path(path), step)
    commit_checkpoint(path)


def step_of(path: Path) -> int:
    return int(torch.load(path / "meta.pt" if path.is_dir() else path)["global_step"])


def set_time(path: Path, seconds: float) -> None:
    os.utime(marker_path(path) if path.is_dir() else path, (seconds, seconds))


KINDS = pytest.mark.parametrize("write", [write_file, write_directory], ids=["file", "directory"])
OVER = pytest.mark.parametrize(
    "before", [None, write_file, write_directory], ids=["new", "over-file", "over-directory"]
)


# -- writing -----------------------------------------------------------------------------------------------------------


@KINDS
@OVER
def test_everything_is_synced_before_the_rename_and_the_folder_after_it(
    write: Any, before: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure, too, leaves the old checkpoint or the new one; as ext4 and POSIX ask for."""
    path = tmp_path / "step=1.ckpt"
    if before is not None:
        save(path, before)
    begin_checkpoint(path)
    write(temporary_path(path), 1)
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        done.append(("sync", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)))
        fsync(descriptor)

    def watched_replace(source: Path, target: Path) -> None:
        done.append(("rename", target.name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    commit_checkpoint(path)
    renamed = done.index(("rename", path.name))
    temporary = temporary_path(path).name
    inside = ["meta.pt", "inner", "inner/shard", ".complete.json", "."] if write is write_directory else ["."]
    assert {name for kind, name in done[:renamed] if kind == "sync"} == {
        os.path.normpath(os.path.join(temporary, name)) for name in inside
    }
    assert ("sync", ".") in done[renamed:]
    if write is write_directory:
        assert done[renamed - 1 - (before is not None)] == ("sync", temporary), "the marker and its entry come last"
    assert (step_of(path), is_complete(path)) == (1, True)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@KINDS
@OVER
@pytest.mark.parametrize("operation", range(12))
def test_there_is_a_complete_checkpoint_at_every_moment(
    write: Any, before: Any, operation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before any of its file operations; the same save again, then, leaves nothing else behind."""

    class Stopped(BaseException):
        pass

    path = tmp_path / "last.ckpt"
    if before is not None:
        save(path, before, 1)
    count = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count > operation:
                raise Stopped
            return original(*arguments, **keywords)

        return function

    with monkeypatch.context() as patch:
        for owner, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree"), (Path, "unlink")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            save(path, write, 2)
        except Stopped:
            found = latest_checkpoint(tmp_path)
            assert found is not None or before is None
            assert found is None or step_of(found) in (1, 2)
    known = 0 if (found := latest_checkpoint(tmp_path)) is None else step_of(found)
    begin_checkpoint(path)
    assert (step_of(path) if path.exists() else 0) == known, "beginning to write takes nothing away"
    write(temporary_path(path), 3)
    commit_checkpoint(path)
    assert step_of(path) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_directory_that_is_being_removed_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step=1.ckpt"
    save(path, write_directory)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(path)
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path / "step=2.ckpt", write_file)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step=2.ckpt"], "the next save sweeps it up"


# -- reading -----------------------------------------------------------------------------------------------------------


def test_the_one_that_was_written_last_is_taken(tmp_path: Path) -> None:
    for step, (name, write) in enumerate(
        {"b.ckpt": write_file, "c.ckpt": write_directory, "a.ckpt": write_file}.items()
    ):
        save(tmp_path / name, write, step)
        set_time(tmp_path / name, 1000 + step)
    write_file(tmp_path / "weights.pt")
    (tmp_path / "metrics.csv").write_text("step,loss")
    assert latest_checkpoint(tmp_path) == tmp_path / "a.ckpt"
    assert latest_checkpoint(str(tmp_path)) == tmp_path / "a.ckpt"
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "a.ckpt")
    assert latest_checkpoint(tmp_path) == tmp_path / "a.ckpt", "not the link"
    set_time(tmp_path / "c.ckpt", 2000)
    assert latest_checkpoint(tmp_path) == tmp_path / "c.ckpt"
    shutil.rmtree(tmp_path / "c.ckpt")
    (tmp_path / "a.ckpt").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "b.ckpt", "the link leads nowhere"


def test_in_a_folder_of_runs_the_newest_run_with_a_checkpoint_counts(tmp_path):
    for version in (0, 2, 10, 11):
        folder = tmp_path / f"version_{version}" / "checkpoints"
        folder.mkdir(parents=True)
        if version != 11:
            torch.save({}, folder / "a.ckpt")
    (tmp_path / "version_final").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "version_10" / "checkpoints" / "a.ckpt"
    assert latest_checkpoint(tmp_path / "version_2") == tmp_path / "version_2" / "checkpoints" / "a.ckpt"
    torch.save({}, tmp_path / "b.ckpt")
    assert latest_checkpoint(tmp_path) == tmp_path / "b.ckpt", "one in the folder itself goes first"


def split_file(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 30)


def split_shard(path: Path) -> None:
    os.truncate(path / "inner" / "shard", 50)


def lose_shard(path: Path) -> None:
    (path / "inner" / "shard").unlink()


def split_marker(path: Path) -> None:
    split_file(marker_path(path))


def lose_marker(path: Path) -> None:
    marker_path(path).unlink()


@pytest.mark.parametrize(
    ("write", "damage", "message"),
    [
        (write_file, split_file, r"skips .*new\.ckpt: the file ends too early.*delete it"),
        *[
            (write_directory, damage, r"skips .*new\.ckpt: it has no valid \.complete\.json.*AtomicCheckpoints")
            for damage in (split_shard, lose_shard, split_marker, lose_marker)
        ],
    ],
)
def test_a_damaged_one_is_passed_over_with_a_warning(write: Any, damage: Any, message: str, tmp_path: Path) -> None:
    save(tmp_path / "old.ckpt", write_file)
    set_time(tmp_path / "old.ckpt", 1000)
    save(tmp_path / "new.ckpt", write)
    assert latest_checkpoint(tmp_path) == tmp_path / "new.ckpt"
    damage(tmp_path / "new.ckpt")
    with pytest.warns(UserWarning, match=message):
        assert latest_checkpoint(tmp_path) == tmp_path / "old.ckpt"


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    write_file(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"a\.ckpt'\) is a file; give its folder, or give the file itself"):
        latest_checkpoint(tmp_path / "a.ckpt")


# -- in a Trainer ------------------------------------------------------------------------------------------------------


class Expect(Callback):
    """During fit the strategy's method is wrapped."""

    wrapped = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.wrapped = "save_checkpoint" in vars(trainer.strategy)


@pytest.mark.parametrize("plugin", [False, True], ids=["callback", "plugin"])
def test_a_trainer_writes_the_same_file_as_without(plugin: bool, tmp_path: Path) -> None:
    def fit(folder: str, *, atomic: bool) -> tuple[dict[str, Any], Any]:
        checkpoint = ModelCheckpoint(tmp_path / folder, every_n_train_steps=1)
        callbacks: list[Callback] = [checkpoint, Expect(), *([AtomicCheckpoints()] if atomic and not plugin else [])]
        plugins = [AtomicCheckpointIO()] if atomic and plugin else []
        trainer = small_models.fit(Regression(), BATCHES, *callbacks, plugins=plugins, enable_checkpointing=True)
        assert callbacks[1].wrapped == (atomic and not plugin)  # type: ignore[attr-defined]
        assert not {"save_checkpoint", "remove_checkpoint"} & vars(trainer.strategy).keys(), "given back"
        assert os.listdir(tmp_path / folder) == ["epoch=0-step=4.ckpt"]
        return torch.load(checkpoint.best_model_path), trainer

    ours, trainer = fit("ours", atomic=True)
    theirs, _ = fit("theirs", atomic=False)
    # The callback also resumes the positions of loaders, which Lightning's own checkpoints do not hold.
    assert ours.keys() - theirs.keys() == (set() if plugin else {"lightning_mp_loaders_made_in"})
    assert theirs.keys() <= ours.keys()
    assert all(
        torch.equal(a, b) for a, b in zip(ours["state_dict"].values(), theirs["state_dict"].values(), strict=True)
    )
    trainer.save_checkpoint(tmp_path / "new" / "after.ckpt")
    assert step_of(tmp_path / "new" / "after.ckpt") == 4


@pytest.mark.parametrize("plugin", [False, True], ids=["callback", "plugin"])
def test_a_folder_of_shards_is_refused_where_a_single_file_is_needed(plugin: bool, tmp_path: Path) -> None:
    (tmp_path / "step.ckpt").mkdir()
    parts: Any = {"plugins": [AtomicCheckpointIO()]} if plugin else {"callbacks": [AtomicCheckpoints()]}
    with pytest.raises(MisconfigurationException, match=r"step.ckpt: it is a folder with shards.*consolidate"):
        quiet_trainer(**parts).fit(Regression(), loader(BATCHES), ckpt_path=tmp_path / "step.ckpt", weights_only=True)


def test_an_exception_gives_the_strategy_its_methods_back_after_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_on_exception=True)
    renamed: list[str] = []
    fails = at(raising(RuntimeError("planted")), step=2)
    trainer = quiet_trainer(callbacks=[AtomicCheckpoints(), checkpoint, fails], enable_checkpointing=True)
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (renamed.append(os.fspath(b)), replace(a, b)))
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(Regression(), loader(BATCHES))
    assert not {"save_checkpoint", "remove_checkpoint"} & vars(trainer.strategy).keys()
    (file,) = tmp_path.iterdir()
    assert renamed == [str(file)]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"global_step": 1}, path)

    def full(checkpoint: Any, file: Any) -> None:
        file.write(b"\0" * 10)
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint({"global_step": 2}, path)
    assert (os.listdir(tmp_path), step_of(path)) == (["last.ckpt"], 1)


def test_paths_with_a_protocol_go_lightnings_way(tmp_path: Path) -> None:
    path = f"memory://{tmp_path.name}/a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"global_step": 1}, path)
    assert TorchCheckpointIO().load_checkpoint(path)["global_step"] == 1
    AtomicCheckpointIO().remove_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        TorchCheckpointIO().load_checkpoint(path)
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})
    module, written = Regression(), f"memory://{tmp_path.name}/run"
    checkpoint = ModelCheckpoint(written, every_n_train_steps=2)
    small_models.fit(module, BATCHES, AtomicCheckpoints(), checkpoint, enable_checkpointing=True)
    saved = TorchCheckpointIO().load_checkpoint(checkpoint.best_model_path)["state_dict"]
    assert all(torch.equal(a, b) for a, b in zip(saved.values(), weights(module), strict=True))
    assert os.listdir(tmp_path) == []


def test_writing_in_the_background(tmp_path: Path) -> None:
    """The callback refuses it and says what to use, and that works."""
    fit: dict[str, Any] = {"enable_checkpointing": True, "plugins": [AsyncCheckpointIO()]}
    with pytest.raises(MisconfigurationException) as error:
        quiet_trainer(callbacks=[AtomicCheckpoints()], **fit).fit(Regression(), loader(BATCHES))
    advice = "AsyncCheckpointIO(AtomicCheckpointIO())"
    assert re.search(re.escape(f"Remove the callback and use plugins=[{advice}]"), str(error.value))
    plugin = AsyncCheckpointIO(AtomicCheckpointIO())
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    small_models.fit(Regression(), BATCHES, checkpoint, plugin=plugin, enable_checkpointing=True)
    path = latest_checkpoint(tmp_path)
    assert path is not None
    assert step_of(path) == 4


def test_a_pytorch_lightning_trainer_is_refused() -> None:
    trainer = pytorch_lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match=r"use `import lightning\.pytorch as pl`"):
        AtomicCheckpoints().setup(trainer, Regression(), "fit")  # type: ignore[arg-type]


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "shard").write_text("weights")
    return path


def test_of_a_link_to_a_folder_only_the_link_is_removed(tmp_path: Path) -> None:
    """As ``ModelCheckpoint(save_last="link")`` makes it."""
    target, link = folder(tmp_path / "step=1.ckpt"), tmp_path / "last.ckpt"
    link.symlink_to(target)
    remove_checkpoint(link)
    assert [path.name for path in tmp_path.iterdir()] == ["step=1.ckpt"]
    assert (target / "shard").read_text() == "weights"


def test_a_folder_can_be_removed_after_a_kill_while_one_of_that_name_was_removed(tmp_path: Path) -> None:
    folder(tmp_path / ".step=1.ckpt.removed")
    remove_checkpoint(folder(tmp_path / "step=1.ckpt"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_brings_a_marker_gets_its_own(tmp_path: Path) -> None:
    """A strategy may mark what it writes; that marker is about to be another one, of another size."""
    path = tmp_path / "step=1.ckpt"
    marker_path(folder(begin_checkpoint(path))).write_text("{}")
    commit_checkpoint(path)
    assert is_complete(path)


@pytest.mark.parametrize("hidden", [temporary_path, previous_path, lambda path: path])
def test_a_complete_folder_that_a_killed_run_left_under_a_hidden_name_gets_its_own(hidden: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, write_directory)
    os.replace(path, hidden(path))
    recover_checkpoint(hidden(path))
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert is_complete(path)


class Interrupted:
    def __reduce__(self):
        raise KeyboardInterrupt


def test_an_interrupt_while_a_file_is_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"module": Interrupted()}, tmp_path / "step=1.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_ranks_wait_for_each_other_before_a_file_is_written_and_before_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order: list[str] = []

    class Ordered(SingleDeviceStrategy):
        def barrier(self, name: str | None = None) -> None:
            order.append(name or "wait")

        def save_checkpoint(self, *arguments: Any, **others: Any) -> None:
            order.append("write")

    for step in ("begin_checkpoint", "commit_checkpoint"):
        monkeypatch.setattr(f"lightning_mp.callbacks.atomic_checkpoints.{step}", lambda path, s=step: order.append(s))

    class Saves(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            order.clear()
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    trainer = quiet_trainer(callbacks=[AtomicCheckpoints(), Saves()], strategy=Ordered(device="cpu"), max_steps=1)
    trainer.fit(Regression(), loader(regression_batches(1)))
    begins, commits = "AtomicCheckpoints begins", "AtomicCheckpoints commits"
    assert order[:5] == ["begin_checkpoint", begins, "write", commits, "commit_checkpoint"]
