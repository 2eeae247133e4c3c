"""A complete directory checkpoint that a killed run left under a hidden name gets the name it was to have."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_mp.checkpoints.atomic import (
    begin_checkpoint,
    commit_checkpoint,
    is_complete,
    previous_path,
    recover_checkpoint,
    temporary_path,
)


@pytest.mark.parametrize("hidden", [temporary_path, previous_path])
def test_it_gets_its_name(hidden: Callable[[Path], Path], tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    begin_checkpoint(path).mkdir()
    (temporary_path(path) / "shard").write_bytes(b"\0" * 100)
    commit_checkpoint(path)
    os.replace(path, hidden(path))
    recover_checkpoint(hidden(path))
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert is_complete(path)


def test_one_that_has_its_name_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.mkdir()
    recover_checkpoint(path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
