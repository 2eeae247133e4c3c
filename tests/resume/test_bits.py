"""Promise 6: what differs between two checkpoints, or two recorded runs, is named to the bit."""

import copy
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_logger import MemoryLogger
from small_models import TokenModel, adamw, at, loader, quiet_trainer, saving, token_batches
from torch import Tensor

from lightning_mp import (
    AccumulationScheduler,
    ChinchillaBudget,
    ExactResume,
    LossScaler,
    MasterWeightsPrecision,
    MFUMonitor,
)
from lightning_mp.__main__ import main
from lightning_mp.training.resume.differences import EXACT_RESUME_KEY, KINDS, compare_checkpoints, kind_of, kinds_in
from lightning_mp.training.resume.records import bit_hash, bit_hash_of_nested, first_parting, read_records, write_record

CPU = torch.device("cpu")


def bits(*words: object) -> int:
    return main(["bits", *map(str, words)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a short run with fp32 weights, a scaler, and an open window with its gradients."""
    path = tmp_path_factory.mktemp("bits") / "saved.ckpt"

    trainer = quiet_trainer(
        plugins=[MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=2.0**10))],
        callbacks=[
            AccumulationScheduler({0: 2}, unit="step", save_partial_gradients=True),
            at(saving(path), batch_idx=2),
        ],
    )
    trainer.fit(TokenModel(adamw), loader(token_batches([3, 4, 2, 5])))
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    # As in files from before parameters were the masters.
    saved["optimizer_states"][0]["state"][0]["master_param"] = saved["state_dict"]["embedding.weight"].clone()
    return saved


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def flipped(value: Any, choose: random.Random) -> Any:
    """With one other bit; None if it has none to flip."""
    if isinstance(value, Tensor) and value.numel():
        changed = value.clone()
        flat = changed.reshape(-1).view(torch.uint8) if changed.dim() else changed.reshape(1).view(torch.uint8)
        flat[choose.randrange(flat.numel())] ^= 1 << (0 if value.dtype is torch.bool else choose.randrange(8))
        return changed
    if isinstance(value, float):
        packed = bytearray(struct.pack("d", value))
        packed[choose.randrange(8)] ^= 1 << choose.randrange(8)
        return struct.unpack("d", packed)[0]
    if type(value) is int:
        return value ^ 1 << choose.randrange(20)
    return None


def unshared(value: Any) -> Any:
    """A copy in which no two entries are one object, as those under the names of two plugins are."""
    if isinstance(value, dict):
        return {key: unshared(inner) for key, inner in value.items()}
    return [unshared(inner) for inner in value] if isinstance(value, list) else value


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def test_fifty_of_fifty_flipped_bits_are_named_and_equal_checkpoints_are_equal(
    checkpoint: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = copy.deepcopy(checkpoint)
    assert compare_checkpoints(checkpoint, same) == []
    choose = random.Random(0)
    places = [path for path, value in leaves(checkpoint) if flipped(value, choose) is not None]
    by_kind = {kind: [path for path in places if kind_of(path) == kind and path[0] != "global_step"] for kind in KINDS}
    for number in range(50):
        kinds = [kind for kind, paths in by_kind.items() if paths]
        kind = kinds[number % len(kinds)]
        path = choose.choice(by_kind[kind])
        other = unshared(checkpoint)
        value = dict(leaves(checkpoint))[path]
        put(other, path, flipped(value, choose))
        (difference,) = compare_checkpoints(checkpoint, other)
        assert (difference.kind, difference.num_different) == (kind, 1), path
    assert {"weights", "masters", "optimizer state", "loss scaler", "counters"} <= {*kinds}
    for name, content in (("a", checkpoint), ("b", same), ("c", other)):
        torch.save(content, tmp_path / f"{name}.ckpt")
    assert bits(tmp_path / "a.ckpt", tmp_path / "b.ckpt") == 0
    assert capsys.readouterr().out.startswith("equal, in elements: weights ")
    assert bits(tmp_path / "a.ckpt", tmp_path / "c.ckpt") == 1
    assert capsys.readouterr().out.startswith(f"different, first in {difference}\n")
    assert bits(tmp_path / "a.ckpt", tmp_path / "c.ckpt", "--json") == 1
    assert json.loads(capsys.readouterr().out)["differences"][0]["kind"] == kind


def test_the_largest_difference_and_the_number_of_elements_are_right() -> None:
    first = {"global_step": 1, "state_dict": {"w": torch.tensor([1.0, 2.0, -3.0, 0.0])}, "epoch": 2}
    second = {"global_step": 1, "state_dict": {"w": torch.tensor([1.0, 2.5, -4.0, -0.0])}, "epoch": 3}
    weights, epoch = compare_checkpoints(first, second)
    assert str(weights) == "weights: w: 3 of 4 elements, by 1 at most"
    assert str(epoch) == "counters: epoch: 1 of 1 elements, by 1 at most"
    (zero,) = compare_checkpoints({"callbacks": {"mean": 0.0, "rate": 1.0}}, {"callbacks": {"mean": -0.0, "rate": 1.0}})
    assert (zero.num_different, zero.largest) == (1, 0.0)
    nan = {"state_dict": {"w": torch.tensor([torch.nan])}}
    assert compare_checkpoints(nan, copy.deepcopy(nan)) == []
    (shape,) = compare_checkpoints({"state_dict": {"w": torch.ones(2)}}, {"state_dict": {"w": torch.ones(2).half()}})
    assert shape.note == "[2] float32 in the first, [2] float16 in the second"
    (missing,) = compare_checkpoints({"state_dict": {"w": torch.ones(2)}}, {"state_dict": {}})
    assert missing.note == "only in the first one"


@pytest.mark.filterwarnings("ignore:ChinchillaBudget. (the run ended after|max_steps=)")
def test_clocks_of_a_resumed_run_are_left_out(tmp_path: Path) -> None:
    def fit(steps: int, name: str, ckpt_path: Path | None = None) -> None:
        callbacks = [ExactResume(), ChinchillaBudget(tokens=10**6), MFUMonitor(peak_flops=1e9, flops_per_token=1e3)]
        trainer = quiet_trainer(
            callbacks=callbacks, max_epochs=-1, max_steps=steps, log_every_n_steps=1, logger=MemoryLogger()
        )
        trainer.fit(TokenModel(adamw), loader(token_batches([3, 4, 2, 5] * 5)), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")

    fit(12, "straight")
    fit(6, "begun")
    fit(12, "resumed", tmp_path / "begun.ckpt")
    assert bits(tmp_path / "straight.ckpt", tmp_path / "resumed.ckpt") == 0
    saved = torch.load(tmp_path / "straight.ckpt", weights_only=True)
    assert {"lightning_mp_device_seconds"} <= set(saved)
    assert "mp/tokens_per_second" in str(saved[EXACT_RESUME_KEY])


def test_folders_and_speeds_of_equal_runs_are_left_out() -> None:
    callbacks = {"ModelCheckpoint{}": {"best_model_path": "a", "dirpath": "a"}, "Timer": {"seconds": 3.0, "n": 1}}
    others = {"ModelCheckpoint{}": {"best_model_path": "b", "dirpath": "b"}, "Timer": {"seconds": 4.0, "n": 1}}
    first = {"callbacks": callbacks, "pytorch-lightning_version": "2.6.0"}
    second = {"callbacks": others, "pytorch-lightning_version": "2.6.6"}
    assert compare_checkpoints(first, second) == []
    assert kinds_in(first) == {"callbacks": 1}


def test_one_flipped_bit_changes_the_hash_of_any_dtype() -> None:
    choose = random.Random(0)
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    for dtype in dtypes:
        for _ in range(10):
            value = torch.randint(0, 2, (3, 5)).to(dtype)
            other = flipped(value, choose)
            assert int(bit_hash([value, value], CPU)) != int(bit_hash([value, other], CPU)) != int(bit_hash([], CPU))
            assert int(bit_hash([value, other], CPU)) != int(bit_hash([other, value], CPU))
    batch = {"x": [torch.ones(2), "text"], "y": torch.zeros(0)}
    assert int(bit_hash_of_nested(batch, CPU)) == int(bit_hash([torch.ones(2)], CPU))


def test_the_first_step_and_kind_at_which_records_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choose = random.Random(0)
    kinds = ("batch", "loss", "gradients", "weights", "state")
    steps = [{kind: choose.getrandbits(63) for kind in kinds} for _ in range(20)]
    straight, resumed = tmp_path / "straight.jsonl", tmp_path / "resumed.jsonl"
    for batch, hashes in enumerate(steps):
        write_record(straight, batch, batch // 2, hashes)
    for batch, hashes in enumerate(steps[:7]):  # what is done again after a kill counts the second time
        write_record(resumed, batch, batch // 2, hashes | ({"loss": 1} if batch == 6 else {}))
    for batch, hashes in enumerate(steps[6:], start=6):
        write_record(resumed, batch, batch // 2, hashes)
    with resumed.open("a") as file:
        file.write('{"batch_nu')  # the end of a run that was killed
    assert bits(straight, resumed) == 0
    assert capsys.readouterr().out == "equal: 20 batches\n"
    for number in range(50):
        batch, kind = choose.randrange(20), kinds[number % 5]
        left = read_records(straight)
        left[batch][kind] ^= 1 << choose.randrange(63)
        parting = first_parting(left, read_records(straight))
        assert (parting.batch, parting.kinds) == (batch, (kind,))
    write_record(resumed.with_name("other.jsonl"), 13, 6, steps[13] | {"weights": 1, "state": 2})
    assert bits(straight, resumed.with_name("other.jsonl")) == 1
    said = "different from step 6, batch 13: first the weights\nin that batch: weights, state\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("none.ckpt", "a.ckpt", "none.ckpt does not exist"),
        ("a.ckpt", "a.jsonl", "one is a .jsonl record and the other is not; give two of a kind"),
        ("a.ckpt", "b.ckpt", "the checkpoints are of steps 1 and 2; compare two of the same step"),
        ("a.ckpt", "text.ckpt", "text.ckpt is not a checkpoint, or it ends too early"),
        ("a.ckpt", "weights.ckpt", "weights.ckpt is not a checkpoint of a Trainer: it has no state_dict"),
        ("a.ckpt", "object.ckpt", "object.ckpt holds objects that can run code when they are loaded; add --trust"),
        ("a.jsonl", "text.jsonl", "text.jsonl, line 1: not a record of ExactResume(record=...): 'no json'"),
        ("a.jsonl", "later.jsonl", "the two files have no batch in common: they record other parts of a run"),
    ],
)
def test_wrong_input_is_one_line(
    first: str, second: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for step, name in ((1, "a"), (2, "b")):
        torch.save({"global_step": step, "state_dict": {}}, f"{name}.ckpt")
    Path("text.ckpt").write_text("no checkpoint")
    torch.save({"w": torch.ones(1)}, "weights.ckpt")
    torch.save({"state_dict": {}, "path": tmp_path, "object": random.Random(0)}, "object.ckpt")
    write_record(Path("a.jsonl"), 0, 0, {"loss": 1})
    write_record(Path("later.jsonl"), 1, 0, {"loss": 1})
    Path("text.jsonl").write_text("no json\n")
    with pytest.raises(SystemExit) as stopped:
        bits(first, second)
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in said
    assert said.count("\n") == 1
