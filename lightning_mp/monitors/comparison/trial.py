"""One run: a fresh module, fresh data and a fresh plugin in a Trainer that leaves nothing behind."""

import copy
import hashlib
import logging
import math
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.quiet_run import interrupts_kept, quiet_lightning
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.monitors.comparison.precisions import PluginFactory
from lightning_mp.training.optimizer_step.gradient_observers import makes_true_gradients
from lightning_mp.training.tokens.batch_tokens import count_samples, find_labels, loss_bearing

_BATCHES_PER_EPOCH = 1000


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Data in one of its forms, in the arguments that a Trainer takes.

    >>> import torch
    >>> TrainingData([torch.zeros(2, 3), torch.zeros(2)]).is_batch
    True
    """

    source: Any
    validation: Any = None

    def __post_init__(self) -> None:
        if any(isinstance(each, DataLoader) for each in _elements(self.source)):
            raise ValueError(
                f"`data` is a {type(self.source).__name__} with a DataLoader in it, and would be treated as one batch."
                " Pass CombinedLoader(...) of lightning.pytorch.utilities, or a LightningDataModule."
            )
        if self.is_batch or isinstance(self.source, pl.LightningDataModule) or callable(self.source):
            return
        if isinstance(self.source, Iterator) or not hasattr(self.source, "__iter__"):
            raise ValueError(
                f"`data` of type {type(self.source).__name__} cannot be trained on several times. Pass a"
                " LightningDataModule, a DataLoader, a function that makes one of these, or one batch."
            )

    @property
    def is_batch(self) -> bool:
        """Whether it is a single batch. Several batches in a list are one too: wrap them in a DataLoader."""
        return isinstance(self.source, Tensor | list | tuple | Mapping)

    def make(self) -> "TrainingData":
        """Calls the function, if it is one."""
        made = self.source() if callable(self.source) and not self.is_batch else self.source
        return TrainingData(made, self.validation)

    def fit_arguments(self) -> dict[str, Any]:
        """For ``trainer.fit``."""
        if isinstance(self.source, pl.LightningDataModule):
            return {"datamodule": self.source}
        if self.is_batch:
            return {"train_dataloaders": RepeatedBatch(self.source)}
        return {"train_dataloaders": self.source, "val_dataloaders": self.validation}

    def validate_arguments(self) -> dict[str, Any]:
        """For ``trainer.validate``."""
        if self.validation is not None:
            return {"dataloaders": self.validation}
        if isinstance(self.source, pl.LightningDataModule):
            return {"datamodule": self.source}
        raise ValueError("`monitor` needs data to validate on. Pass `val_data`, or a LightningDataModule as data.")


def _elements(source: Any) -> Iterable[Any]:
    if isinstance(source, Mapping):
        return source.values()
    return source if isinstance(source, list | tuple) else ()


class RepeatedBatch:
    """A loader that gives the same batch again and again."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return _BATCHES_PER_EPOCH

    def __iter__(self) -> Iterator[Any]:
        return (self._batch for _ in range(_BATCHES_PER_EPOCH))


def items_in(batch: Any) -> tuple[int, str]:
    """Target tokens of a batch, or where it has none its samples; with their name."""
    labels = find_labels(batch)
    if labels is not None:
        return int(loss_bearing(labels, shifted=False).sum()), "tokens"
    try:
        return count_samples(batch), "samples"
    except ValueError:
        return 1, "batches"


ModuleFactory = Callable[[], pl.LightningModule]
_SAMPLED_ELEMENTS = 1024  # of each tensor go into a digest
_DIGESTED_BATCHES = 4  # of each epoch


def set_seed(*parts: int) -> None:
    """Sets every global generator from some numbers, without a word in the environment or the log."""
    import numpy as np

    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def weights_digest(module: torch.nn.Module) -> str:
    """Tells whether two modules have the same shapes and start from the same weights, from a sample of each tensor."""
    sha = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not is_lazy(tensor):  # the first batch draws it
            _digest(sha, name, tensor)
    return sha.hexdigest()[:16]


def _digest(sha: Any, name: str, tensor: Tensor) -> None:
    flat = tensor.detach().reshape(-1)
    sampled = flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)].cpu().contiguous()
    sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    sha.update(sampled.view(torch.uint8).numpy().tobytes() if sampled.numel() else b"")


class Recorder(Callback):
    """Losses, what was trained on, and random numbers that do not depend on the precision."""

    def __init__(self, seed: int) -> None:
        self.losses: list[Tensor] = []
        self.first_batch: Any = None
        self.items = 0
        self.unit = "samples"
        self.digest = hashlib.sha256()
        self.seconds = 0.0
        self._seed = seed
        self._batches = 0
        self._in_epoch = 0
        self._has_loss = False
        self._began = math.nan

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Random numbers of the set-up."""
        set_seed(self._seed, -1)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records losses before Lightning divides them, and batches before the plugin converts them."""
        plugin, training_step = trainer.precision_plugin, pl_module.training_step

        @wraps(training_step)  # Lightning inspects its signature
        def step_and_record(*args: Any, **kwargs: Any) -> Any:
            return self._record(training_step(*args, **kwargs))

        patches = Patches.of(trainer)
        patches.replace(pl_module, "training_step", step_and_record)
        convert = patches.replace(plugin, "convert_input", lambda batch: convert.original(self._count(trainer, batch)))

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Random numbers of the order of the data."""
        if trainer.current_epoch:
            self.check(trainer)  # epochs without a step would continue for ever
        self._in_epoch = 0
        set_seed(self._seed, -2, trainer.current_epoch)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Random numbers of the batch."""
        if not self._batches:
            self._began = time.perf_counter()
        self._has_loss = False
        set_seed(self._seed, self._batches, 0)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Random numbers until the next batch."""
        set_seed(self._seed, self._batches, 1)
        self._batches += 1

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        if self.losses:
            float(self.losses[-1])  # waits for the device
        self.seconds = time.perf_counter() - self._began

    def check(self, trainer: pl.Trainer) -> None:
        """Refuses a run in which nothing was trained."""
        if not self._batches:
            raise ValueError("`data` is empty: compare_precisions() trained on no batch. Pass at least one.")
        if not self.losses and trainer.lightning_module.automatic_optimization:
            raise ValueError(
                "`module` returned no loss from training_step, so nothing was trained. Return the loss, or a dict with"
                " it under 'loss'."
            )
        if not trainer.global_step:
            raise ValueError(
                "`module` made no optimizer step in a whole epoch. In manual optimization step what self.optimizers()"
                " returns: Lightning counts only these steps."
            )

    def _record(self, output: Any) -> Any:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        # an optimizer that calls its closure several times has several losses; the first is that of the batch
        if isinstance(loss, Tensor) and not self._has_loss:
            self._has_loss = True
            self.losses.append(loss.detach().float().mean())
        return output

    def _count(self, trainer: pl.Trainer, batch: Any) -> Any:
        """Sees the batch before the plugin changes its formats."""
        if trainer.training:
            if not self.items:
                self.first_batch = batch
            items, self.unit = items_in(batch)
            self.items += items
            if self._in_epoch < _DIGESTED_BATCHES:
                for tensor in tensors_in(batch):
                    _digest(self.digest, "", tensor)
            self._in_epoch += 1
        return batch


@dataclass(frozen=True, slots=True)
class Experiment:
    """What all runs of a comparison share."""

    make_module: ModuleFactory  # a module with its initial weights; called once per run, after the seed is set
    data: TrainingData  # what to train on
    precisions: Mapping[str, PluginFactory]  # makes the plugin of each precision; the first one is the baseline
    accelerator: str  # of the Trainer, "cpu", "cuda" or "mps"
    trainer_options: Mapping[str, Any]  # of the Trainer, such as `gradient_clip_val`

    @property
    def device(self) -> torch.device:
        """The device of the runs."""
        return torch.device(self.accelerator)


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one run."""

    # of each batch, undivided by accumulation; empty where `training_step` returns none, as it may in manual
    # optimization
    train_losses: tuple[float, ...]
    items: int  # tokens or samples trained on
    unit: str  # "tokens" or "samples"
    metric: float | None  # the validation metric that was requested
    seconds: float  # of the fit, from the first batch on
    weights_digest: str  # of the initial weights
    data_digest: str  # of the first batches of each epoch
    first_batch: Any  # as it was before the plugin changed its formats
    skipped_steps: int | None  # after an overflow; None under a plugin of Lightning, which does not count them


def run_trial(
    experiment: Experiment,
    precision: str,
    *,
    seed: int,
    steps: int,
    callbacks: Sequence[Callback] = (),
    monitor: str | None = None,
    data: TrainingData | None = None,
) -> Trial:
    """Trains for some optimizer steps.

    Everything random is a function of the seed and the batch: at the start and the end of each batch the generators are
    set again. A precision that draws more random numbers than another one sees the same data nevertheless.
    """
    set_seed(seed)
    module = experiment.make_module()
    digest = weights_digest(module)
    recorder = Recorder(seed)
    options = copy.deepcopy(dict(experiment.trainer_options))
    own_callbacks = options.pop("callbacks", None) or []
    own_callbacks = [own_callbacks] if isinstance(own_callbacks, Callback) else list(own_callbacks)
    with TemporaryDirectory() as folder, quiet_lightning(logging.ERROR), interrupts_kept():
        warnings.filterwarnings("ignore", category=PossibleUserWarning)  # advice on long runs
        trainer = pl.Trainer(
            **{**_QUIET_OPTIONS, **options},
            plugins=[experiment.precisions[precision]()],
            accelerator=experiment.accelerator,
            devices=1,
            max_steps=steps,
            max_epochs=-1,
            callbacks=[*own_callbacks, *callbacks, recorder],
            default_root_dir=folder,
        )
        counts_skips = makes_true_gradients(trainer.precision_plugin)
        source = (data or experiment.data).make()
        set_seed(seed)  # before `setup` and `configure_model`, after the plugin's constructor: any may draw numbers
        with _failures_explained(precision, seed):
            trainer.fit(module, **source.fit_arguments())
        recorder.check(trainer)
        metric = _validated(trainer, module, source, monitor) if monitor is not None else None
    return Trial(
        train_losses=tuple(torch.stack(recorder.losses).tolist()) if recorder.losses else (),
        items=recorder.items,
        unit=recorder.unit,
        metric=metric,
        seconds=recorder.seconds,
        weights_digest=digest,
        data_digest=recorder.digest.hexdigest()[:16],
        first_batch=recorder.first_batch,
        skipped_steps=RunState.of(trainer).skipped_steps if counts_skips else None,
    )


def _validated(trainer: pl.Trainer, module: pl.LightningModule, source: TrainingData, monitor: str) -> float:
    trainer.validate(module, **source.validate_arguments(), verbose=False)
    metrics = trainer.callback_metrics
    if monitor not in metrics:
        raise ValueError(
            f"`monitor` {monitor!r} was not logged in validation; logged were {', '.join(sorted(metrics)) or 'none'}."
            " Pass one of these, or leave monitor out to compare the training loss."
        )
    return float(metrics[monitor])


_QUIET_OPTIONS = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
    "val_check_interval": 10**9,
}


@contextmanager
def _failures_explained(precision: str, seed: int) -> Iterator[None]:
    """Says which run failed, and what to do if something follows a metric that validation would log."""
    try:
        yield
    except (MisconfigurationException, RuntimeError) as error:
        if "ReduceLROnPlateau conditioned on metric" not in str(error):
            error.add_note(f"This was the run in {precision!r} with seed {seed} of compare_precisions().")
            raise
        raise ValueError(
            f"`module` needs a metric that is not there: {error} Validation runs only after the last step. If that logs"
            " it, pass trainer_options={'check_val_every_n_epoch': 1, 'val_check_interval': 1.0}."
        ) from error
