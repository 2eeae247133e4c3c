"""FSDP2Strategy(async_checkpoints=True): shards that are written while training continues."""

import contextlib
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fsdp2_runs import fp16, fsdp2, model, train
from gloo import RankError, run_ranks, run_same_ranks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from small_models import Regression, at, quiet_trainer, saving
from torch.distributed.checkpoint import FileSystemWriter

from lightning_mp import AtomicCheckpoints, JointOptimizer, MasterWeightsPrecision, matrices_and_rest
from lightning_mp.__main__ import main
from lightning_mp.checkpoints import latest_checkpoint
from lightning_mp.training.checkpoints import background
from lightning_mp.training.distributed import process_groups

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore::UserWarning:torchao", "ignore::DeprecationWarning"),
]


@contextlib.contextmanager
def writes(before: Callable[[], None]) -> Iterator[None]:
    """Calls a function before this rank writes its shards."""
    write_data = FileSystemWriter.write_data

    def write(writer: Any, *args: Any) -> Any:
        before()
        return write_data(writer, *args)

    with patch.object(FileSystemWriter, "write_data", write):
        yield


class SavedAt(Callback):
    """Saves after these steps, and notes how many steps are made while the last save is held up."""

    def __init__(self, folder: Path, saved_at: tuple[int, ...], released_at: int | None = None) -> None:
        self.folder, self.saved_at, self.released_at = folder, saved_at, released_at
        self.released = threading.Event()
        self.seen: list[tuple[int, bool]] = []

    def path(self, step: int) -> Path:
        return self.folder / f"step={step}.ckpt"

    def hold_last(self) -> None:
        if dist.get_rank() == 0 and all(self.path(step).exists() for step in self.saved_at[:-1]):
            assert self.released.wait(60)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        if step in self.saved_at:
            trainer.save_checkpoint(self.path(step))
        elif self.released_at is not None and self.saved_at[-1] < step <= self.released_at:
            self.seen.append((step, self.path(self.saved_at[-1]).exists()))
        if step == self.released_at:
            self.released.set()

    def on_exception(self, *_: Any) -> None:
        self.released.set()


class Muon(type(model())):  # type: ignore[misc]
    def configure_optimizers(self) -> Any:
        matrices, rest = matrices_and_rest(self)
        return JointOptimizer([torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)], module=self)


class LowBit(type(model())):  # type: ignore[misc]
    def configure_optimizers(self) -> Any:
        from torchao.optim import AdamW8bit

        return AdamW8bit(self.parameters(), lr=1e-2)


def masters() -> MasterWeightsPrecision:
    return MasterWeightsPrecision("bf16-true", storage="remainder")


def made(kind: type[Any], width: int = 16) -> Any:
    torch.manual_seed(0)
    return kind(layers=1, heads=2, width=width, block_tokens=8, vocab=32, learning_rate=1e-2)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "fp16": (fp16, model),
    "masters": (masters, model),
    "joint": (masters, lambda: made(Muon)),
    "8 bit": (masters, lambda: made(LowBit, 128)),
}


@pytest.mark.parametrize(
    "kind", ["masters", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("fp16", "joint", "8 bit"))]
)
def test_training_continues_and_the_checkpoint_has_the_bits_of_its_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are made while rank 0's write is held up; the folder is that of a run that waited for it."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    plugin, module = KINDS[kind]

    def run(rank: int, name: str, **arguments: Any) -> tuple[SavedAt, dict[str, torch.Tensor]]:
        saved = SavedAt(tmp_path / name, (1, 3), 5)
        strategy = fsdp2(async_checkpoints=name == "background")
        with writes(saved.hold_last if name == "background" else lambda: None):
            found = train(rank, 2, strategy, module=module(), plugin=plugin(), steps=6, callbacks=[saved], **arguments)
        return saved, found["weights"]

    def on_rank(rank: int) -> tuple[list[Any], bool]:
        _, straight = run(rank, "waits")
        saved, weights = run(rank, "background")
        dist.barrier()
        _, resumed = run(rank, "resumed", ckpt_path=saved.path(3))
        return saved.seen, all(
            torch.equal(weights[name], value) and torch.equal(resumed[name], value) for name, value in straight.items()
        )

    imports = ("torchao.optim",) if kind == "8 bit" else ()
    for name in imports:
        importlib.import_module(name)  # which allows its classes to be read
    assert run_same_ranks(on_rank, 2, imports=imports) == [([(4, False), (5, False)], True)] * 2
    for step in (1, 3):
        paths = [str(tmp_path / name / f"step={step}.ckpt") for name in ("waits", "background")]
        assert main(["bits", *paths]) == 0
    assert not list((tmp_path / "background").glob(".*"))


def test_old_checkpoints_are_removed_when_the_new_one_has_its_name(tmp_path: Path) -> None:
    def on_rank(rank: int) -> list[str]:
        held, seen = threading.Event(), []

        class Looks(Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 3:
                    seen.extend(sorted(path.name for path in tmp_path.glob("*.ckpt") if path.exists()))
                    held.set()

        def hold_second() -> None:
            if (tmp_path / "step=1.ckpt").exists():
                assert held.wait(60)

        keep = ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=2, save_top_k=1, monitor="step", mode="max", save_last="link"
        )
        first = SavedAt(tmp_path, (1,))
        with writes(hold_second):
            callbacks = [first, keep, Looks(), AtomicCheckpoints()]
            train(rank, 2, fsdp2(async_checkpoints=True), steps=4, callbacks=callbacks, enable_checkpointing=True)
        dist.barrier()
        return seen

    # The second save, of step 2, has no name at step 3; at the end the third has replaced it.
    assert run_same_ranks(on_rank, 2) == [["step=1.ckpt"]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=1.ckpt", "step=4.ckpt"]
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "step=4.ckpt"


def test_one_is_written_at_a_time_and_the_wait_is_said_once(tmp_path: Path) -> None:
    """Before the shards of the next are copied, so that host memory holds them once."""

    def on_rank(rank: int) -> tuple[set[int], list[str]]:
        copies, said, step = set(), [], 0
        copy_to_host = background.copy_to_host

        def copy(state: Any) -> Any:
            copies.add(step - len(list(tmp_path.glob("*.ckpt"))))
            return copy_to_host(state)

        class Counts(SavedAt):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                nonlocal step
                step = trainer.global_step
                super().on_train_batch_end(trainer, *args)

        with (
            writes(lambda: time.sleep(0.05)),  # so that the next save comes too early
            patch.object(background, "copy_to_host", copy),
            patch.object(background, "rank_zero_info", said.append),
        ):
            saved = Counts(tmp_path, (1, 2, 3, 4))
            train(rank, 2, fsdp2(async_checkpoints=True), steps=4, callbacks=[saved])
        return copies, said

    for copies, said in run_same_ranks(on_rank, 2):
        assert copies == {1}  # the one that is saved now is the only one without its name
        assert len(said) == 1
        assert f"waits until {tmp_path / 'step=1.ckpt'} is written, because step=2.ckpt is due" in said[0]
    assert len(list(tmp_path.glob("*.ckpt"))) == 4


@pytest.mark.parametrize("plugin", [fp16, masters])
def test_ranks_copy_their_parts_of_12_bytes_per_parameter_or_14_with_masters(plugin: Any, tmp_path: Path) -> None:
    """As docs/fsdp2.md says of AdamW: weights, two moments, and masters; tied weights once for each name."""

    def on_rank(rank: int) -> tuple[int, int]:
        copied = 0
        copy_to_host = background.copy_to_host

        def copy(state: Any) -> Any:
            nonlocal copied
            if isinstance(state, torch.Tensor) and not hasattr(state, "__tensor_flatten__") and state.dim():
                copied += state.nbytes
            return copy_to_host(state)

        module = model()
        with patch.object(background, "copy_to_host", copy):
            saved = SavedAt(tmp_path, (2,))
            train(rank, 2, fsdp2(async_checkpoints=True), module=module, plugin=plugin(), steps=2, callbacks=[saved])
        states = sum(p.numel() * {torch.float32: 8, torch.bfloat16: 12}[p.dtype] for p in module.parameters())
        return copied, states + sum(weight.numel() * weight.element_size() for weight in module.state_dict().values())

    copied, expected = zip(*run_same_ranks(on_rank, 2), strict=True)
    assert sum(copied) == expected[0]
    assert max(copied) < 1.1 * min(copied)


@pytest.mark.parametrize("broken", ["write of rank 1", "rename of rank 0"])
def test_a_failed_write_ends_training_in_the_same_step_on_all_ranks(broken: str, tmp_path: Path) -> None:
    class Removes(SavedAt):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            if trainer.global_step == 3:
                trainer.strategy.remove_checkpoint(self.path(1))
                while not trainer.strategy._background.is_done:
                    time.sleep(0.01)

    def on_rank(rank: int) -> tuple[str, int]:
        saved, last = Removes(tmp_path, (1, 3)), 0

        def fail(*_: Any) -> None:
            if saved.path(1).exists():
                raise OSError("planted: no space left")

        class Counts(Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                nonlocal last
                last = trainer.global_step

        commit = background.commit_checkpoint

        def fail_to_commit(path: Path) -> None:
            fail()
            commit(path)

        by_write = broken.startswith("write")
        with (
            writes(fail if by_write and rank == 1 else lambda: None),
            patch.object(background, "commit_checkpoint", commit if by_write else fail_to_commit),
            pytest.raises(RuntimeError) as caught,
        ):
            train(rank, 2, fsdp2(async_checkpoints=True), steps=9, callbacks=[saved, Counts()])
        return str(caught.value), last

    for message, last in run_same_ranks(on_rank, 2):
        where = "rank 1: " if broken.startswith("write") else ""
        assert f"{tmp_path / 'step=3.ckpt'} could not be written in the background: {where}OSError: planted" in message
        assert f"ckpt_path=latest_checkpoint({str(tmp_path)!r})" in message
        assert last == 4  # of nine: all ranks leave before the second batch after it
    assert latest_checkpoint(tmp_path) == tmp_path / "step=1.ckpt"


def planted_error() -> None:
    raise ValueError("planted")


def interrupt() -> None:
    raise KeyboardInterrupt


def ask_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("end", "raised"),
    [(planted_error, ValueError), (interrupt, SystemExit), (ask_to_end, SIGTERMException), (lambda: None, None)],
    ids=["exception", "ctrl-c", "sigterm", "its end"],
)
def test_whatever_ends_a_run_waits_for_its_checkpoint(end: Any, raised: Any, tmp_path: Path) -> None:
    def on_rank(rank: int) -> tuple[list[Any], bool]:
        saved = SavedAt(tmp_path, (3,), 4)

        class Ends(Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 4:
                    saved.released.set()
                    end()

        def hold() -> None:
            assert saved.released.wait(60)
            time.sleep(0.3)  # longer than what is left of the run

        ends = contextlib.nullcontext() if raised is None else pytest.raises(raised)
        with writes(hold), ends:
            train(rank, 2, fsdp2(async_checkpoints=True), steps=4, callbacks=[saved, Ends()])
        complete = latest_checkpoint(tmp_path) == saved.path(3)
        return saved.seen, complete

    run = run_ranks if raised is not None else run_same_ranks  # which leaves handlers of signals behind
    assert run(on_rank, 2) == [([(4, False)], True)] * 2


@pytest.mark.parametrize("ends", ["by itself", "by an exception"])
def test_a_failure_of_the_last_write_is_raised_by_fit_or_said_beside_its_exception(ends: str, tmp_path: Path) -> None:
    def on_rank(rank: int) -> tuple[str, list[str]]:
        def fail() -> None:
            raise OSError("planted: no space left")

        acts = [saving(tmp_path / "a.ckpt"), *([lambda *_: planted_error()] if ends == "by an exception" else [])]
        callbacks, said = [at(act, step=2) for act in acts], list[str]()
        with (
            writes(fail),
            patch.object(background, "rank_zero_warn", said.append),
            pytest.raises((RuntimeError, ValueError)) as caught,
        ):
            train(rank, 2, fsdp2(async_checkpoints=True), steps=2, callbacks=callbacks)
        return str(caught.value), said

    message = f"The checkpoint {tmp_path / 'a.ckpt'} could not be written"
    for raised, said in run_same_ranks(on_rank, 2):
        if ends == "by itself":
            assert message in raised
            assert said == []
        else:
            assert raised == "planted"
            assert len(said) == 1
            assert message in said[0]


def test_a_checkpoint_is_complete_before_it_is_read_and_at_once_after_a_run(tmp_path: Path) -> None:
    def read(trainer: Any, _: Any) -> None:
        path = tmp_path / "a.ckpt"
        trainer.save_checkpoint(path)
        assert trainer.strategy.load_checkpoint(path)["global_step"] == trainer.global_step

    def on_rank(rank: int) -> bool:
        with writes(lambda: time.sleep(0.1)):
            strategy = fsdp2(async_checkpoints=True)
            train(rank, 2, strategy, steps=2, callbacks=[at(read)], save_to=tmp_path / "b.ckpt")
        return latest_checkpoint(tmp_path) == tmp_path / "b.ckpt"

    assert run_same_ranks(on_rank, 2) == [True, True]


@pytest.mark.parametrize("when", ["writes", "renames"])
def test_a_kill_in_the_background_leaves_the_checkpoint_before_it(when: str, tmp_path: Path) -> None:
    """The resumed run ends with the weights of one that was not killed."""
    victim = 1 if when == "writes" else 0

    def on_rank(rank: int, name: str, kills: bool) -> dict[str, torch.Tensor]:
        saved = SavedAt(tmp_path / name, (1, 3, 5))

        def kill(*_: Any) -> None:
            if kills and rank == victim and saved.path(1).exists():
                os.kill(os.getpid(), signal.SIGKILL)

        commit = background.commit_checkpoint

        def commit_or_die(path: Path) -> None:
            kill()
            commit(path)

        with (
            writes(kill if when == "writes" else lambda: None),
            patch.object(background, "commit_checkpoint", commit_or_die if when == "renames" else commit),
        ):
            found = train(
                rank,
                2,
                fsdp2(async_checkpoints=True),
                plugin=masters(),
                steps=6,
                callbacks=[saved],
                ckpt_path=latest_checkpoint(saved.folder),
            )
        return found["weights"]

    with pytest.raises(RankError, match=f"Rank {victim} was ended by SIGKILL"):
        run_ranks(lambda rank: on_rank(rank, "killed", True), 2)
    latest = latest_checkpoint(tmp_path / "killed")
    assert latest is not None
    assert latest.name == "step=1.ckpt"
    runs = run_same_ranks(lambda rank: [on_rank(rank, name, False) for name in ("killed", "straight")], 2)
    for resumed, straight in runs:
        assert all(torch.equal(resumed[name], value) for name, value in straight.items())
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == [f"step={n}.ckpt" for n in (1, 3, 5)]


def test_a_torch_without_gloo_is_refused() -> None:
    def on_rank(rank: int) -> str:
        trainer = quiet_trainer(devices=1, strategy=fsdp2("net.0", async_checkpoints=True))
        with (
            patch.object(process_groups.dist, "is_gloo_available", lambda: False),
            pytest.raises(MisconfigurationException) as caught,
        ):
            trainer.fit(Regression(), [])
        return str(caught.value)

    assert "built without gloo. Use a build with gloo" in run_same_ranks(on_rank, 1)[0]
