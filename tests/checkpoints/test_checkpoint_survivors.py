"""Checkpoint folders where a small slip would go unnoticed."""

from pathlib import Path

import pytest

from lightning_mp.checkpoints.atomic import (
    AtomicCheckpointIO,
    begin_checkpoint,
    commit_checkpoint,
    is_complete,
    marker_path,
    remove_checkpoint,
)


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


class Interrupted:
    def __reduce__(self):
        raise KeyboardInterrupt


def test_an_interrupt_while_a_file_is_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"module": Interrupted()}, tmp_path / "step=1.ckpt")
    assert list(tmp_path.iterdir()) == []
