"""Folders with shards that somebody else may have written: what could run code is refused before it is read."""

import pickle
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
import torch
from fsdp2_runs import fsdp2
from gloo import run_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from small_models import Regression, loader, quiet_trainer, regression_batches, shard
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_mp import AtomicCheckpoints
from lightning_mp.checkpoints import consolidate_checkpoint
from lightning_mp.training.checkpoints.atomic import marker_path
from lightning_mp.training.checkpoints.checked_folder import CheckedReader, load_shards

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]


class Call(str):
    """Unpickled, it calls something; a string, as torch wants values to be that are no tensors or numbers."""

    def __new__(cls, function: Any, *arguments: Any) -> "Call":
        call = super().__new__(cls)
        call.function, call.arguments = function, arguments
        return call

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def everything() -> dict[str, Any]:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool, torch.int8]
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in [*dtypes, torch.float8_e4m3fn, torch.uint8]}
    layouts = {"last": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last), "none": torch.ones(0)}
    return {
        "state_dict": OrderedDict(tensors | layouts | {"scalar": torch.tensor(3.0)}),
        "optimizer_0": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "fused": None, "params": ["a", "b"]}]},
    }


def test_a_table_of_contents_is_what_torch_reads(tmp_path: Path) -> None:
    """D57, of every dtype and layout; guards the list of what torch writes."""
    save(everything(), checkpoint_id=tmp_path, no_dist=True)
    ours, theirs = CheckedReader(tmp_path).read_metadata(), FileSystemReader(tmp_path).read_metadata()
    assert replace(ours, storage_meta=None) == replace(theirs, storage_meta=None)
    assert ours.storage_meta.save_id == theirs.storage_meta.save_id
    state = everything()
    wanted = everything()
    for name, tensor in state["state_dict"].items():
        state["state_dict"][name] = torch.zeros_like(tensor)
    state["optimizer_0"]["param_groups"][0]["lr"] = 0.0
    load_shards(state, tmp_path, weights_only=True, no_dist=True)
    assert state["optimizer_0"] == wanted["optimizer_0"]
    assert all(torch.equal(state["state_dict"][name], tensor) for name, tensor in wanted["state_dict"].items())


def plant(folder: Path, what: Any) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(replace(metadata, planner_data=what)))


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (lambda mark: Call(Path.touch, mark), r"pathlib(\._local)?\.Path\.touch|builtins\.getattr"),
        (lambda mark: Call(eval, f"open({str(mark)!r}, 'w')"), r"builtins\.eval"),
        (lambda mark: Call(getattr, Metadata, "__init__"), r"builtins\.getattr\(<class .*Metadata'>, '__init__'\)"),
        (lambda mark: Call(torch.load, str(mark)), r"torch\.serialization\.load"),
        (lambda mark: partial(print), r"functools\.partial"),
    ],
    ids=["method", "eval", "getattr", "torch.load", "harmless"],
)
def test_a_table_of_contents_that_could_run_code_is_refused_by_name(tmp_path: Path, what: Any, name: str) -> None:
    """D57."""
    save(everything(), checkpoint_id=tmp_path, no_dist=True)
    mark = tmp_path / "code ran"
    plant(tmp_path, what(mark))
    with pytest.raises(ValueError, match=rf"\.metadata refers to ({name}), which torch.* does not write there"):
        CheckedReader(tmp_path).read_metadata()
    assert not mark.exists()


def test_a_name_with_dots_reaches_nothing_inside_of_torch(tmp_path: Path) -> None:
    """D57: pickle looks up the parts one after the other."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c\x17serialization.os.system\x93\x8c\x04true\x85R.")
    with pytest.raises(ValueError, match=r"refers to torch\.serialization\.os\.system"):
        CheckedReader(tmp_path).read_metadata()


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_values_are_read_as_weights_only_says(tmp_path: Path, weights_only: bool | None) -> None:
    """D57, for what torch keeps beside tensors, as hyperparameters of optimizers."""
    folder, mark = tmp_path / "folder", tmp_path / "code ran"
    save({"lr": 0.1, "note": Call(Path.mkdir, mark)}, checkpoint_id=folder, no_dist=True)
    state = {"lr": 0.0}
    load_shards(state, folder, weights_only=weights_only, no_dist=True)
    assert state == {"lr": 0.1}
    if weights_only is False:
        load_shards({"note": ""}, folder, weights_only=weights_only, no_dist=True)
    else:
        with pytest.raises(ValueError, match=r"'note' in the folder .* is not read, .* Unsupported global: .*getattr"):
            load_shards({"note": ""}, folder, weights_only=weights_only, no_dist=True)
    assert mark.exists() is (weights_only is False)


def test_what_is_no_table_of_contents_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"\.metadata holds a dict, not a table of contents"):
        CheckedReader(tmp_path).read_metadata()


def test_a_folder_written_on_windows_is_read(tmp_path: Path) -> None:
    save(everything(), checkpoint_id=tmp_path, no_dist=True)
    pickled = (tmp_path / ".metadata").read_bytes()
    assert pickled.count(b"\x8c\x09PosixPath") == 1
    (tmp_path / ".metadata").write_bytes(pickled.replace(b"\x8c\x09PosixPath", b"\x8c\x0bWindowsPath"))
    folder = CheckedReader(tmp_path).read_metadata().storage_meta.checkpoint_id
    assert isinstance(folder, PureWindowsPath)


class Sharded(Regression):
    def configure_model(self) -> None:
        shard(self, self.net)


def fit(make: Any, folder: Path | None, to: Path | None = None, note: Any = None) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters)
        if note is not None:
            made.param_groups[0]["note"] = note
        return made

    trainer = quiet_trainer(
        strategy=make(),
        callbacks=[AtomicCheckpoints()],
        max_steps=1 if folder is None else 2,
        max_epochs=-1,
        precision="32-true",
    )
    module = Sharded if make is stock else Regression
    trainer.fit(module(optimizer), loader(regression_batches(2)), ckpt_path=folder)
    if to is not None:
        trainer.save_checkpoint(to)


def stock() -> ModelParallelStrategy:
    return ModelParallelStrategy(
        data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=True, process_group_backend="gloo"
    )


@pytest.mark.parametrize("make", [fsdp2, stock], ids=["FSDP2Strategy", "ModelParallelStrategy"])
def test_strategies_run_no_code_of_a_folder_they_resume_from(make: Any, tmp_path: Path) -> None:
    """D57: neither of its table of contents nor of values that are no tensors."""
    folder, noted, mark = tmp_path / "a.ckpt", tmp_path / "b.ckpt", tmp_path / "code ran"

    def run(rank: int) -> None:
        fit(make, None, folder)
        fit(make, None, noted, note=Call(Path.mkdir, mark))
        with pytest.raises(
            ValueError, match=r"'optimizer_0\.param_groups\..*note' in the folder .*b\.ckpt .* run code"
        ):
            fit(make, noted, note="other")
        plant(folder, Call(Path.mkdir, mark))
        with pytest.raises(ValueError, match=r"a\.ckpt/\.metadata refers to"):
            fit(make, folder)
        assert not mark.exists()

    run_ranks(run, 1)
    marker_path(folder).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"a\.ckpt/\.metadata refers to"):
        consolidate_checkpoint(folder, tmp_path / "whole.ckpt")
    assert not mark.exists()
