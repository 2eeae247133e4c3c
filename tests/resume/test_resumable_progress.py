"""Promise 6: whichever batch a checkpoint was written after, a restarted run goes on with the next one."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from restarts import (
    BATCHES,
    SAVES,
    Interruption,
    Save,
    SizedStream,
    Stream,
    Trace,
    Traced,
    TurningStream,
    ValidatedByEpoch,
    interrupted,
    interrupted_before,
    trace,
)
from small_models import at, quiet_trainer, raising

from lightning_mp import AtomicCheckpoints, ChinchillaBudget, StopAtBoundary
from lightning_mp.training.resume.resumable_progress import reopen_epoch, skip_started_epoch

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    # Lightning counts the steps of an epoch itself, and takes a loader in the middle of one for one without a state.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:ChinchillaBudget. the run ended after .* budgeted tokens"),
]

STREAMS = {"with a length": SizedStream, "without one": Stream, "with a sampler": TurningStream}
LIMITS = {"epochs": {"max_epochs": 3}, "steps": {"max_epochs": -1, "max_steps": 3 * BATCHES - 2}}

a_stream = pytest.mark.parametrize("stream", STREAMS.values(), ids=list(STREAMS))


@pytest.mark.full
@a_stream
@pytest.mark.parametrize("limit", LIMITS.values(), ids=list(LIMITS))
@pytest.mark.parametrize("save", SAVES.values(), ids=list(SAVES))
def test_a_restarted_run_sees_the_same_batches(
    save: Save, limit: dict[str, int], stream: type[Stream], tmp_path: Path
) -> None:
    """D59, D60, D62. In the same epochs, at the same learning rates and logged steps; epochs end, and are validated."""
    straight = interrupted(tmp_path / "straight", (), list, save, stream, **limit)
    # Before the last batch of an epoch; after it, and then inside the next one, or at its end; before a first batch.
    for before in ((4,), (5, 2), (5, 5), (7, 3), (3, 1)):
        restarted = interrupted(tmp_path / str(before), before, lambda: [AtomicCheckpoints()], save, stream, **limit)
        assert restarted == straight, before


@a_stream
@pytest.mark.parametrize("limit", LIMITS.values(), ids=list(LIMITS))
@pytest.mark.parametrize("reload", [0, 1], ids=["one loader", "a loader for each epoch"])
def test_an_epoch_that_ended_in_its_first_hook_begins_again(
    reload: int, limit: dict[str, int], stream: type[Stream], tmp_path: Path
) -> None:
    class WithLoader(Traced):
        def train_dataloader(self) -> Stream:
            return stream()

    def run(name: str, *epochs: int) -> Trace:
        saves = {"filename": "last", "enable_version_counter": False, "every_n_train_steps": 100}
        trainers = [
            quiet_trainer(
                callbacks=[
                    AtomicCheckpoints(),
                    ModelCheckpoint(tmp_path / name, save_on_exception=True, **saves),  # type: ignore[arg-type]
                    at(raising(Interruption()), "on_train_epoch_start", call=epoch),
                ],
                enable_checkpointing=True,
                reload_dataloaders_every_n_epochs=reload,
                **limit,
            )
            for epoch in (*epochs, 0)
        ]
        return trace(trainers, type(None), tmp_path / name / "last.ckpt", module=WithLoader)

    straight = run("straight")
    for epochs in ((1,), (2,), (2, 1), (2, 2)):
        assert run(str(epochs), *epochs) == straight, epochs


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@a_stream
def test_a_validation_that_was_made_up_for_may_write_the_next_checkpoint(stream: type[Stream], tmp_path: Path) -> None:
    """It comes before the first batch of the restart, which a loader without a length has fetched by then."""

    def trainer(*callbacks: Callback, **saves: Any) -> pl.Trainer:
        checkpoint = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False, **saves)
        return quiet_trainer(
            callbacks=[AtomicCheckpoints(), checkpoint, *callbacks],
            enable_checkpointing=True,
            num_sanity_val_steps=0,
            val_check_interval=2,
            check_val_every_n_epoch=None,
            max_epochs=3,
        )

    never = {"every_n_train_steps": 1000}
    straight = trace([trainer(**never)], stream, tmp_path / "none.ckpt", module=ValidatedByEpoch)
    trainers = [
        trainer(at(raising(Interruption()), "on_validation_start"), every_n_train_steps=2),
        trainer(interrupted_before(1), monitor="score", save_on_train_epoch_end=False),
        trainer(**never),
    ]
    assert trace(trainers, stream, tmp_path / "last.ckpt", module=ValidatedByEpoch) == straight


@pytest.mark.parametrize("before", [(3,), (5,), (6, 3)])
def test_a_validation_inside_an_epoch_is_made_up_for(before: tuple[int, ...], tmp_path: Path) -> None:
    """Checkpoints of every second step, written before the validation of every second step."""
    save = Save({"every_n_train_steps": 2, "save_top_k": 0}, ValidatedByEpoch)
    runs, stops = [], []
    for name, where in (("straight", ()), ("restarted", before)):
        stops.append(EarlyStopping("score", patience=100))

        def callbacks(stop: EarlyStopping = stops[-1]) -> list[Callback]:
            return [AtomicCheckpoints(), stop]

        arguments: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 2}
        runs.append(interrupted(tmp_path / name, where, callbacks, save, SizedStream, **arguments))
    assert runs[0] == runs[1]
    assert stops[0].wait_count == stops[1].wait_count == 3 * 2 - 1


def goes_on_as(straight: Trace, stopped: Trace) -> bool:
    """The same, but that Lightning ends the epoch where the run ends as well."""
    further = {name for name, *_ in stopped.events - straight.events}
    return stopped._replace(events=stopped.events & straight.events) == straight and further <= {"on_train_epoch_end"}


def total_steps(limit: str, end: int | None) -> dict[str, int]:
    """Of a run that ends early, or of one that ends after three epochs."""
    if limit == "epochs":
        return {"max_epochs": 3 if end is None else end // BATCHES}
    return {"max_epochs": -1, "max_steps": 3 * BATCHES - 1 if end is None else end}


@a_stream
@pytest.mark.parametrize("limit", LIMITS)
def test_a_run_that_had_ended_goes_on_with_a_larger_limit(limit: str, stream: type[Stream], tmp_path: Path) -> None:
    """D61. From a checkpoint that was written after ``fit``, inside an epoch or at the end of one."""
    straight = trace([quiet_trainer(**total_steps(limit, None))], stream, tmp_path / "none.ckpt")
    for ends in ((4,), (8,), (4, 8)) if limit == "epochs" else ((1,), (4,), (5,), (3, 6), (4, 5), (4, 8)):
        trainers = [quiet_trainer(callbacks=[AtomicCheckpoints()], **total_steps(limit, end)) for end in (*ends, None)]
        assert goes_on_as(straight, trace(trainers, stream, tmp_path / f"{ends}.ckpt", saves_after=True)), ends


def asks_to_stop(stop: StopAtBoundary, step: int) -> Callback:
    """After an optimizer step, as a scheduler of jobs does."""
    return at(lambda *_: setattr(stop._fit, "asked_by", "SIGTERM"), "on_train_batch_start", step=step)


@a_stream
def test_a_run_that_was_asked_to_stop_goes_on(stream: type[Stream], tmp_path: Path) -> None:
    limit = total_steps("epochs", None)
    straight = trace([quiet_trainer(**limit)], stream, tmp_path / "none.ckpt")
    for steps in ((1,), (3,), (3, 5), (7,)):
        path = tmp_path / str(steps) / "stopped.ckpt"
        stops = [StopAtBoundary(dirpath=path.parent, filename="stopped") for _ in steps]
        trainers = [
            *(
                quiet_trainer(callbacks=[stop, asks_to_stop(stop, n)], **limit)
                for stop, n in zip(stops, steps, strict=True)
            ),
            quiet_trainer(callbacks=[StopAtBoundary()], **limit),
        ]
        assert goes_on_as(straight, trace(trainers, stream, path)), steps
        assert all(stop.stopped_by == "SIGTERM" for stop in stops)


@a_stream
@pytest.mark.parametrize("tokens", [3, 4, 6])
def test_a_budget_that_was_spent_can_be_raised(tokens: int, stream: type[Stream], tmp_path: Path) -> None:
    """From the checkpoint that ChinchillaBudget writes; ``max_epochs`` counts the epoch in which it ended once."""

    def spends(tokens: int) -> pl.Trainer:
        budget = ChinchillaBudget(tokens=tokens, count=lambda batch: 1, landing="floor")
        checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1000)
        return quiet_trainer(callbacks=[budget, checkpoint], enable_checkpointing=True, max_epochs=3)

    straight = trace([spends(11)], stream, tmp_path / "none.ckpt")
    path = tmp_path / f"budget_reached-step-{tokens}.ckpt"
    assert goes_on_as(straight, trace([spends(tokens), spends(11)], stream, path))
    assert path.exists()


def progress(epochs: tuple[int, int, int, int], batches: int, is_last: bool) -> dict[str, Any]:
    names = ("ready", "started", "processed", "completed")
    return {
        "epoch_progress": {key: dict(zip(names, epochs, strict=True)) for key in ("total", "current")},
        "epoch_loop.batch_progress": {"current": {"ready": batches}, "is_last_batch": is_last},
    }


@pytest.mark.parametrize(
    ("epochs", "batches", "is_last", "reopened"),
    [
        pytest.param((0, 0, 0, 0), 0, False, (0, 0, 0, 0), id="before the first epoch"),
        pytest.param((1, 1, 0, 0), 3, False, (1, 1, 0, 0), id="inside an epoch"),
        pytest.param((1, 1, 1, 0), 4, True, (1, 1, 1, 0), id="in on_train_epoch_end"),
        pytest.param((2, 1, 1, 1), 4, True, (2, 1, 1, 1), id="in on_train_epoch_start"),
        pytest.param((2, 2, 2, 2), 3, False, (2, 2, 1, 1), id="ended inside an epoch"),
        pytest.param((2, 2, 2, 2), 4, False, (2, 2, 2, 1), id="ended with an epoch"),
        pytest.param((2, 2, 2, 2), 2, True, (2, 2, 2, 1), id="ended with a stream"),
    ],
)
def test_only_the_epoch_of_a_run_that_has_ended_is_opened_again(
    epochs: tuple[int, int, int, int], batches: int, is_last: bool, reopened: tuple[int, int, int, int]
) -> None:
    state = progress(epochs, batches, is_last)
    reopen_epoch(state, num_batches=4)
    assert state == progress(reopened, batches, is_last)


@pytest.mark.parametrize(
    ("epochs", "left"),
    [
        pytest.param((0, 0, 0, 0), (0, 0, 0, 0), id="before the first epoch"),
        pytest.param((1, 0, 0, 0), (0, 0, 0, 0), id="in on_train_epoch_start of the first epoch"),
        pytest.param((2, 1, 1, 1), (1, 1, 1, 0), id="in that of the second one"),
        pytest.param((2, 2, 1, 1), (2, 2, 1, 1), id="inside an epoch"),
        pytest.param((2, 2, 2, 2), (2, 2, 2, 2), id="ended"),
    ],
)
def test_only_an_epoch_in_its_first_hook_is_left_out(
    epochs: tuple[int, int, int, int], left: tuple[int, int, int, int]
) -> None:
    state = progress(epochs, 4, True)
    skip_started_epoch(state)
    assert state == progress(left, 4, True)


def test_a_second_fit_saves_its_own_position_in_the_data(tmp_path: Path) -> None:
    positions = []

    def save(trainer: pl.Trainer, _: Any) -> None:
        trainer.save_checkpoint(tmp_path / "inside.ckpt")
        loops = torch.load(tmp_path / "inside.ckpt", weights_only=True)["loops"]
        positions.append(loops["fit_loop"]["state_dict"]["combined_loader"][0]["position"])

    trainer = quiet_trainer(callbacks=[AtomicCheckpoints(), at(save)], max_epochs=1)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Traced(), SizedStream())
    assert positions == [*range(1, BATCHES + 1)] * 2
