"""Promise 6, with ordinary loaders: dropout, shuffled data and augmentation continue to the bit."""

import re
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from exact_runs import BATCH, BATCHES, LOADERS, SAMPLES, SAVES, Augmented, Dropped, Memory, run
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from restarts import Interruption, saved_and_interrupted
from small_models import at, quiet_trainer, stop_run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

from lightning_mp import (
    AccumulationScheduler,
    AtomicCheckpoints,
    AutocastPrecision,
    ChinchillaBudget,
    ExactResume,
    LossScaler,
    StopAtBoundary,
)
from lightning_mp.__main__ import main
from lightning_mp.callbacks import exact_resume
from lightning_mp.ground.core.patches import Patches
from lightning_mp.training.resume.loader_position import LoaderPosition
from lightning_mp.training.resume.random_numbers import captured, restore

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.* is defined in your"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]


EACH_STEP_OR_THE_LAST = ("each step", "on an exception")
WORKERS = [loader for loader in LOADERS if "workers" in loader]
CASES = [(loader, save) for loader in LOADERS if loader not in WORKERS for save in EACH_STEP_OR_THE_LAST]
# to start workers takes long: in turn
CASES += [(loader, EACH_STEP_OR_THE_LAST[number % 2]) for number, loader in enumerate(WORKERS)]
CASES += [(loader, save) for loader in ("shuffle", "no length") for save in ("each validation", "each epoch")]


@pytest.mark.full
@pytest.mark.parametrize(("loader", "save"), CASES)
def test_a_resumed_run_is_equal_to_the_bit(loader: str, save: str, tmp_path: Path) -> None:
    """Weights, optimizer, order of samples, logged metrics, stopping, and the random numbers behind the end."""
    make, saved = LOADERS[loader], SAVES[save]
    straight = run(tmp_path / "straight", (), make, saved)
    # before the first batch of an epoch; in the middle of one, and soon again
    for before in ((BATCHES + 1,), (BATCHES + 2, 2)):
        resumed = run(tmp_path / str(before), before, make, saved)
        assert resumed.differences(straight) == [], before


#: Which call of them writes a checkpoint and interrupts the run; those of the sanity check are before it.
HOOKS = {
    "on_train_batch_end": 8,
    "on_validation_start": 4,
    "on_validation_batch_end": 6,
    "on_validation_end": 3,
    "on_train_epoch_end": 2,
    "on_train_epoch_start": 2,
}


@pytest.mark.full
@pytest.mark.parametrize("hook", HOOKS)
def test_a_checkpoint_may_be_written_in_any_hook(hook: str, tmp_path: Path) -> None:
    """Inside of a validation, or between epochs; with a learning rate that follows the mean loss of the epoch."""

    def fit(name: str, *callbacks: Callback, ckpt_path: Path | None = None, memory: Memory | None = None) -> Any:
        pl.seed_everything(0 if ckpt_path is None else 5, verbose=False)
        trainer = quiet_trainer(
            callbacks=[ExactResume(), EarlyStopping("largest", patience=1, check_on_train_epoch_end=True), *callbacks],
            logger=memory,
            log_every_n_steps=1,
            val_check_interval=3,
            max_epochs=20,
        )
        module = Dropped(plateau=True)
        try:
            trainer.fit(module, LOADERS["shuffle"](), ckpt_path=ckpt_path)
        except Interruption:
            return module
        return trainer, module

    path, memories = tmp_path / "saved.ckpt", (Memory(), Memory())
    expected, straight = fit("straight", memory=memories[0])
    fit("killed", at(saved_and_interrupted(path), hook, call=HOOKS[hook]), memory=memories[1])
    trainer, resumed = fit("resumed", ckpt_path=path, memory=memories[1])
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    assert memories[0].logged == memories[1].logged
    assert 3 <= trainer.current_epoch == expected.current_epoch < 20  # stopped early
    assert trainer.optimizers[0].param_groups[0]["lr"] == expected.optimizers[0].param_groups[0]["lr"] < 0.05


def test_no_sample_is_loaded_twice_and_the_loader_is_as_it_was(tmp_path: Path) -> None:
    loaders = [LOADERS["shuffle"]() for _ in range(2)]
    samplers = [loader.batch_sampler for loader in loaders]
    attributes = set(vars(loaders[0]))
    run(tmp_path, (3,), iter(loaders).__next__, SAVES["each step"], max_epochs=1)
    first, second = (loader.dataset.loaded for loader in loaders)
    assert len(first) == 3 * BATCH  # the third batch was loaded before the interruption
    assert sorted([*first[: 2 * BATCH], *second]) == list(range(SAMPLES))
    for loader, sampler in zip(loaders, samplers, strict=True):
        assert loader.batch_sampler is sampler
        assert set(vars(loader)) == attributes


@pytest.mark.full
def test_a_run_without_a_checkpoint_is_what_it_was_without_the_callback(tmp_path: Path) -> None:
    for loader in ("shuffle", "generator", "a sampler in Python", "stream"):
        runs = [
            run(
                tmp_path / f"{loader}{len(callbacks)}",
                (),
                LOADERS[loader],
                SAVES["each epoch"],
                make_callbacks=lambda callbacks=callbacks: callbacks,
            )
            for callbacks in ([], [ExactResume()])
        ]
        assert runs[0].differences(runs[1]) == []


@pytest.mark.full
# Lightning's ModelCheckpoint saves after the first micro-batch of a resumed run; no run here resumes from that file.
@pytest.mark.filterwarnings("ignore:This checkpoint is written inside an accumulation window")
def test_in_fp16_with_skipped_steps_inside_windows(tmp_path: Path) -> None:
    """With the pack's other parts; two checkpoints of one step are equal for `lightning-mp bits`."""

    def arguments() -> dict[str, Any]:
        scaler = LossScaler(init_scale=2.0**24, growth_interval=2)
        return {"plugins": [AutocastPrecision("16-mixed", scaler=scaler)], "accumulate_grad_batches": 2}

    def callbacks() -> list[Callback]:
        return [ExactResume(), AtomicCheckpoints()]

    make, save = LOADERS["shuffle"], SAVES["each step"]
    straight = run(tmp_path / "straight", (), make, save, make_callbacks=callbacks, **arguments())
    for before in ((3,), (8, 4)):
        resumed = run(tmp_path / "resumed" / str(before), before, make, save, make_callbacks=callbacks, **arguments())
        assert resumed.differences(straight) == []
    assert (
        main(["bits", str(tmp_path / "straight" / "last.ckpt"), str(tmp_path / "resumed" / "(3,)" / "last.ckpt")]) == 0
    )


class StochasticSGD(torch.optim.SGD):
    """Rounds its weights to multiples of 1/64, up or down at random, as optimizers of 16-bit weights do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_((parameter * 64 + torch.rand_like(parameter)).floor() / 64)
        return loss


class Stochastic(Dropped):
    def configure_optimizers(self) -> Any:
        return StochasticSGD(self.parameters(), lr=0.05, momentum=0.9)


def stateful() -> Any:
    reason = "needs torchdata's StatefulDataLoader"
    loading = pytest.importorskip("torchdata.stateful_dataloader", reason=reason)
    return loading.StatefulDataLoader(Augmented(), batch_size=BATCH, shuffle=True)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:ChinchillaBudget. the run ended after .* budgeted tokens")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(LOADERS["shuffle"], id="own"),
        pytest.param(LOADERS["workers"], id="workers"),
        pytest.param(stateful, id="torchdata", marks=pytest.mark.filterwarnings("ignore")),
    ],
)
def test_inside_of_a_window_with_a_budget_and_an_optimizer_that_draws(make: Any, tmp_path: Path) -> None:
    """Windows of three batches, whose gradient is saved in the middle; the budget ends in the second epoch."""

    def callbacks() -> list[Callback]:
        return [
            ExactResume(),
            AccumulationScheduler({0: 3}, unit="step", save_partial_gradients=True),
            ChinchillaBudget(tokens=40, count=lambda batch: len(batch[1]), landing="floor"),
        ]

    runs = [
        run(
            tmp_path / str(before),
            before,
            make,
            SAVES["on an exception"],
            make_callbacks=callbacks,
            module=Stochastic,
            val_check_interval=2,
        )
        for before in ((), (5,), (BATCHES + 3,), (3, 4))
    ]
    assert max(runs[0].steps) < (1, BATCHES - 1)
    for number, result in enumerate(runs):
        # a resumed run logs the tokens of its first step when they are counted, not one step later
        logged = {(step, name): value for (step, name), value in result.logged.items() if not name.startswith("mp/")}
        found = {
            batch: {name: value for name, value in values.items() if not name.startswith("mp/")}
            for batch, values in result.found.items()
        }
        runs[number] = result._replace(logged=logged, found=found)
    for resumed in runs[1:]:
        assert resumed.differences(runs[0]) == []


class DrawsAtTheEnd(Dropped):
    def on_train_epoch_end(self) -> None:
        torch.rand(())


@pytest.mark.full
@pytest.mark.parametrize("val_check_interval", [2, 3], ids=["a validation is due", "none is due"])
@pytest.mark.parametrize("ends", ["max_steps", "should_stop", "StopAtBoundary"])
def test_a_run_that_had_ended_goes_on(ends: str, val_check_interval: int, tmp_path: Path) -> None:
    """Its checkpoint is written after the run, inside of an epoch."""

    def fit(max_steps: int, ckpt_path: Path | None = None) -> Any:
        pl.seed_everything(0 if ckpt_path is None else 5, verbose=False)
        stops_early = ends != "max_steps" and max_steps < BATCHES + 5
        stops: Any = {  # `should_stop` is set by EarlyStopping and Timer, too; Lightning validates then, due or not
            "should_stop": [at(stop_run, step=max_steps)],
            "StopAtBoundary": [
                at(lambda *_: signal.raise_signal(signal.SIGTERM), step=max_steps),
                StopAtBoundary(dirpath=tmp_path),
            ],
        }
        trainer = quiet_trainer(
            callbacks=[ExactResume(), *(stops[ends] if stops_early else [])],
            max_epochs=-1,
            max_steps=BATCHES + 5 if stops_early else max_steps,
            val_check_interval=val_check_interval,
        )
        module = DrawsAtTheEnd()
        trainer.fit(module, LOADERS["shuffle"](), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{max_steps}{ckpt_path is None}.ckpt")
        return module.steps

    straight = fit(BATCHES + 5)
    begun = fit(BATCHES + 2)
    assert len(begun) == BATCHES + 2
    assert begun | fit(BATCHES + 5, tmp_path / f"{BATCHES + 2}True.ckpt") == straight
    assert main(["bits", *(str(tmp_path / f"{BATCHES + 5}{name}.ckpt") for name in (True, False))]) == 0


@pytest.mark.full
def test_ranks_that_stopped_before_a_validation_was_due_go_on(tmp_path: Path) -> None:
    """Each rank draws other numbers; the stop is after the third batch, and every second one is due."""

    def fits(rank: int) -> list[list[Tensor]]:
        warnings.filterwarnings("ignore", "It is recommended to use `self.log")
        weights = []
        for max_steps, resumes in ((7, False), (3, False), (7, True)):
            pl.seed_everything(10 * resumes + rank, verbose=False)
            trainer = quiet_trainer(
                callbacks=[ExactResume(), *([at(stop_run, step=3)] if max_steps == 3 else [])],
                max_epochs=-1,
                max_steps=7,
                val_check_interval=2,
                strategy="ddp",
                devices=2,
            )
            module = DrawsAtTheEnd()
            trainer.fit(module, LOADERS["shuffle"](), ckpt_path=tmp_path / "3False.ckpt" if resumes else None)
            trainer.save_checkpoint(tmp_path / f"{max_steps}{resumes}.ckpt")
            weights.append([parameter.detach().clone() for parameter in module.parameters()])
        return weights

    for straight, stopped, resumed in run_ranks(fits, 2):
        assert all(map(torch.equal, resumed, straight))
        assert not any(map(torch.equal, stopped, straight))
    assert main(["bits", str(tmp_path / "7False.ckpt"), str(tmp_path / "7True.ckpt")]) == 0


def test_a_run_that_was_stopped_has_no_trace_of_its_last_validation(tmp_path: Path) -> None:
    """Lightning validates once more when a run stops, and `save_last=True` writes after it."""

    def fit(*stop: Callback, ckpt_path: Path | None = None) -> Any:
        pl.seed_everything(0 if ckpt_path is None else 5, verbose=False)
        checkpoint = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=100)
        trainer = quiet_trainer(
            callbacks=[ExactResume(), checkpoint, *stop], enable_checkpointing=True, max_epochs=1, val_check_interval=5
        )
        module = Dropped()
        trainer.fit(module, LOADERS["shuffle"](), ckpt_path=ckpt_path)
        return len(module.steps), [parameter.tolist() for parameter in module.parameters()], torch.rand(()).item()

    steps, *_ = fit(at(stop_run, step=3))
    rest, *resumed = fit(ckpt_path=tmp_path / "last.ckpt")
    straight_steps, *straight = fit()
    assert steps == 3
    assert steps + rest == straight_steps
    assert resumed == straight


class Operations(TorchDispatchMode):
    """Counts what is computed between the first batch and the end of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


def test_what_it_costs(tmp_path: Path) -> None:
    """Nothing between checkpoints, and in one the random numbers and those of each loader."""
    numbers, states = [], []
    for callbacks in ([], [ExactResume()]):
        operations = Operations()
        counted = [
            at(lambda *_, mode=operations: mode.__enter__(), "on_train_batch_start", batch_idx=0),
            at(lambda *_, mode=operations: mode.__exit__(None, None, None), batch_idx=BATCHES - 1),
        ]
        trainer = quiet_trainer(callbacks=[*callbacks, *counted], limit_val_batches=0)
        with patch.object(exact_resume, "captured", wraps=captured) as copies:
            trainer.fit(Dropped(), LOADERS["shuffle"]())
        assert copies.call_count <= 3  # before the first batch, at the beginning of the epoch, and at its end
        numbers.append(operations.number)
    assert numbers[0] == numbers[1] > 10 * BATCHES
    for loader in ("shuffle", "max_size"):
        saved = torch.load(saved_after(tmp_path, LOADERS[loader]()), weights_only=True)
        torch.save(saved["lightning_mp_exact_resume"], tmp_path / "state.pt")
        states.append((tmp_path / "state.pt").stat().st_size)
    assert states[0] < 2 * 20_000
    assert states[1] - states[0] < 20_000


def test_a_record_names_the_step_and_kind_that_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def bump(trainer: Any, pl_module: Any) -> None:
        next(pl_module.parameters()).grad.view(torch.int32)[0, 0] ^= 1 << 20

    files = [tmp_path / name for name in ("straight.jsonl", "resumed.jsonl", "other.jsonl")]
    bumps = at(bump, "on_after_backward", step=4)
    for file, before, others in zip(files, ((), (3,), ()), ([], [], [bumps]), strict=True):
        run(
            tmp_path / file.stem,
            before,
            LOADERS["shuffle"],
            SAVES["each step"],
            make_callbacks=lambda file=file, others=others: [ExactResume(record=file), *others],
            max_epochs=1,
            limit_val_batches=0,
        )
    assert main(["bits", str(files[0]), str(files[1])]) == 0
    assert capsys.readouterr().out == f"equal: {BATCHES} batches\n"
    assert main(["bits", str(files[0]), str(files[2])]) == 1
    assert capsys.readouterr().out.startswith("different from step 5, batch 4: first the gradients\n")


def test_random_numbers_of_all_libraries_are_put_back() -> None:
    import random

    device = torch.device("cpu")
    random.gauss()  # leaves a second number behind
    np.random.standard_normal()
    state = captured(device)
    drawn = [(torch.rand(1).item(), random.gauss(), np.random.standard_normal()) for _ in range(2)]
    restore(state, device)
    assert [(torch.rand(1).item(), random.gauss(), np.random.standard_normal()) for _ in range(2)] == drawn
    with pytest.raises(ValueError, match="state of random numbers cannot be loaded: 'python' is a tensor of shape"):
        restore(state | {"python": torch.zeros(3)}, device)


# -- bad input ---------------------------------------------------------------------------------------------------------


def saved_after(tmp_path: Path, loader: Any, batches: int = 2, callback: Callback | None = None) -> Path:
    path = tmp_path / "saved.ckpt"
    saves = at(saved_and_interrupted(path), call=batches)
    trainer = quiet_trainer(callbacks=[callback or ExactResume(), saves])
    with pytest.raises(Interruption):
        trainer.fit(Dropped(), loader)
    return path


def resume(path: Path, loader: Any) -> None:
    quiet_trainer(callbacks=[ExactResume()]).fit(Dropped(), loader, ckpt_path=path)


class Drawing(Sampler[int]):
    """Draws from global random numbers for each index."""

    def __iter__(self) -> Any:
        return (int(torch.randint(SAMPLES, ())) for _ in range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Augmented()[i] for i in range(SAMPLES))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(Augmented(20), BATCH), "the dataset's length was 22 in the checkpoint's run and is 20 now"),
        (lambda: DataLoader(Augmented(), 5), "batch size times ranks was 4 in the checkpoint's run and is 5 now"),
        (LOADERS["workers"], r"the number of workers \(0, or any\) was 0 in the checkpoint's run and is 1 now"),
        (LOADERS["in order"], "batch 2 of this epoch has other indices than before, as SequentialSampler does not"),
    ],
)
def test_a_loader_that_is_another_one_is_refused(loader: Any, message: str, tmp_path: Path) -> None:
    path = saved_after(tmp_path, LOADERS["shuffle"]())
    with pytest.raises(ValueError, match=message):
        resume(path, loader())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.clear(), "state of ExactResume cannot be loaded: it has no 'num_ranks', 'per_rank'"),
        (
            lambda state: state["per_rank"][0].pop("random"),
            "ExactResume on rank 0 cannot be loaded: it has no 'random'",
        ),
        (
            lambda state: state["per_rank"][0]["random"]["now"].update(torch=torch.zeros(3)),
            "state of random numbers cannot be loaded: 'torch' is a tensor of shape",
        ),
        (
            lambda state: state["per_rank"][0]["loaders"][0].update(batches=-1),
            "state of a training loader cannot be loaded: 'batches' is -1; it must be a whole number from 0",
        ),
    ],
)
def test_a_damaged_state_changes_nothing(damage: Any, message: str, tmp_path: Path) -> None:
    path = saved_after(tmp_path, LOADERS["shuffle"]())
    checkpoint = torch.load(path, weights_only=True)  # tensors and plain values
    damage(checkpoint["lightning_mp_exact_resume"])
    torch.save(checkpoint, path)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        quiet_trainer(callbacks=[ExactResume()]).fit(Dropped(), LOADERS["shuffle"](), ckpt_path=path)
    if "loader" not in message:
        torch.manual_seed(3)
        assert torch.equal(state, torch.get_rng_state())


def test_a_checkpoint_of_a_run_without_the_callback_is_said_to_be_one(tmp_path: Path) -> None:
    path = saved_after(tmp_path, LOADERS["in order"](), callback=Callback())
    with pytest.warns(UserWarning, match="ExactResume: this checkpoint holds no random state and no position"):
        resume(path, LOADERS["in order"]())


class Batches:
    def __iter__(self) -> Any:
        return iter([(torch.ones(1, 3), torch.zeros(1))])


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: DataLoader(Endless(), BATCH), "the iterable dataset Endless has no state_dict"),
        (Batches, "Batches is no DataLoader and has no state_dict"),
        (lambda: DataLoader(Augmented(), BATCH, sampler=Drawing()), "Drawing draws from global random numbers in the"),
        (
            lambda: DataLoader(Augmented(), BATCH, num_workers=1, in_order=False),
            r"with DataLoader\(in_order=False\) the order depends on the speed of the workers",
        ),
    ],
)
def test_a_loader_that_cannot_be_resumed_is_named(loader: Any, reason: str) -> None:
    text = f"ExactResume cannot resume the training loader: {reason}"
    with pytest.warns(UserWarning, match=text):
        quiet_trainer(callbacks=[ExactResume()], limit_train_batches=3, limit_val_batches=0).fit(Dropped(), loader())
    with pytest.raises(MisconfigurationException, match=text):
        quiet_trainer(callbacks=[ExactResume(on_unsupported="error")]).fit(Dropped(), loader())


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"ExactResume\(on_unsupported='ignore'\): it must be 'warn' or 'error'"):
        ExactResume(on_unsupported="ignore")  # type: ignore[arg-type]
    for record in ("bits.txt", True, Path("bits")):
        with pytest.raises(ValueError, match=rf"ExactResume\(record={re.escape(repr(record))}\): give a file named \*"):
            ExactResume(record=record)


@pytest.mark.full
def test_loaders_made_before_the_checkpoint_is_read_continue_too(tmp_path: Path) -> None:
    """`trainer.estimated_stepping_batches` in configure_optimizers makes them early."""

    class OneCycle(Dropped):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 3 * BATCHES
            return super().configure_optimizers()

    for loader in ("shuffle", "workers that persist"):
        runs = [
            run(tmp_path / loader / str(before), before, LOADERS[loader], SAVES["each step"], module=OneCycle)
            for before in ((), (BATCHES + 3,))
        ]
        assert runs[1].differences(runs[0]) == []


def position_of(rank: int, seed: int) -> tuple[LoaderPosition, DistributedSampler[Any]]:
    data = TensorDataset(torch.arange(8.0))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, rank, seed=seed)
    trainer = quiet_trainer()
    trainer.strategy.connect(pl.LightningModule())
    workers = DataLoader(data, batch_size=2, sampler=sampler, num_workers=1)
    return LoaderPosition(workers, Patches(trainer), rank, 2), sampler


def test_batches_of_two_data_ranks_have_other_seeds_in_workers() -> None:
    seeds = []
    for rank in (0, 1):
        torch.manual_seed(0)
        position, _ = position_of(rank, 0)
        position._is_being_made = True
        next(position.indices())
        seeds.append(position._seed(0))
    assert seeds[0] != seeds[1]


def test_a_resumed_run_shuffles_by_the_seed_of_the_checkpoint() -> None:
    later, sampler = position_of(0, seed=2)
    later.load_state_dict(position_of(0, seed=1)[0].state_dict())
    assert sampler.seed == 1
