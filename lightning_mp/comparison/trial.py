"""One run: a fresh module, fresh data and a fresh plugin in a Trainer that leaves nothing behind."""

import copy
import hashlib
import logging
import math
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_mp.comparison.precisions import PluginFactory
from lightning_mp.comparison.training_data import TrainingData, items_in
from lightning_mp.core.instance_method import InstancePatch
from lightning_mp.core.nested_tensors import tensors_in
from lightning_mp.core.quiet_run import interrupts_kept, quiet_lightning

__all__ = ["Experiment", "Trial", "run_trial"]

ModuleFactory = Callable[[], pl.LightningModule]

_SAMPLED_ELEMENTS = 1024  # of each tensor go into a digest
_DIGESTED_BATCHES = 4  # of each epoch


@dataclass(frozen=True, slots=True)
class Experiment:
    """What all runs of a comparison share.

    Attributes:
        make_module: a module with its initial weights; called once per run, after the seed is set.
        data: what to train on.
        precisions: makes the plugin of each precision; the first one is the baseline.
        accelerator: of the Trainer, "cpu", "cuda" or "mps".
        trainer_options: of the Trainer, such as ``gradient_clip_val``.
    """

    make_module: ModuleFactory
    data: TrainingData
    precisions: Mapping[str, PluginFactory]
    accelerator: str
    trainer_options: Mapping[str, Any]

    @property
    def device(self) -> torch.device:
        """The device of the runs."""
        return torch.device(self.accelerator)


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one run.

    Attributes:
        train_losses: of each batch, undivided by accumulation.
        items: tokens or samples trained on.
        unit: "tokens" or "samples".
        metric: the validation metric that was asked for.
        seconds: of the fit, from the first batch on.
        weights_digest: of the initial weights.
        data_digest: of the first batches of each epoch.
    """

    train_losses: tuple[float, ...]
    items: int
    unit: str
    metric: float | None
    seconds: float
    weights_digest: str
    data_digest: str


def run_trial(
    experiment: Experiment,
    precision: str,
    *,
    seed: int,
    steps: int,
    callbacks: Sequence[Callback] = (),
    monitor: str | None = None,
    data: TrainingData | None = None,
    make_module: ModuleFactory | None = None,
) -> Trial:
    """Trains for some optimizer steps.

    Everything random is a function of the seed and the batch: at the start and the end of each batch the generators are
    set anew. A precision that draws more random numbers than another one sees the same data nevertheless.

    Args:
        experiment: what the runs share.
        precision: one of ``experiment.precisions``.
        seed: of weights, data and dropout.
        steps: as in ``Trainer(max_steps=...)``.
        callbacks: besides those of the experiment.
        monitor: validate at the end, and read this metric.
        data: instead of that of the experiment.
        make_module: instead of that of the experiment.

    Raises:
        ValueError: nothing was trained, or ``monitor`` was not logged.
    """
    set_seed(seed)
    module = (make_module or experiment.make_module)()
    digest = weights_digest(module)
    recorder = _Recorder(seed)
    options = {**copy.deepcopy(dict(experiment.trainer_options))}
    own_callbacks = options.pop("callbacks", None) or []
    own_callbacks = [own_callbacks] if isinstance(own_callbacks, Callback) else list(own_callbacks)
    set_seed(seed)  # a seed of its own for what comes after the weights
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
        source = (data or experiment.data).make()
        trainer.fit(module, **source.fit_arguments())
        if not recorder.losses:
            raise ValueError(_NOTHING_TRAINED)
        metric = _validated(trainer, module, source, monitor) if monitor is not None else None
    return Trial(
        train_losses=tuple(float(loss) for loss in torch.stack(recorder.losses).tolist()),
        items=recorder.items,
        unit=recorder.unit,
        metric=metric,
        seconds=recorder.seconds,
        weights_digest=digest,
        data_digest=recorder.digest.hexdigest()[:16],
    )


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
        _digest(sha, name, tensor)
    return sha.hexdigest()[:16]


def _digest(sha: Any, name: str, tensor: Tensor) -> None:
    flat = tensor.detach().reshape(-1)
    sampled = flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)].cpu().contiguous()
    sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
    sha.update(sampled.view(torch.uint8).numpy().tobytes() if sampled.numel() else b"")


class _Recorder(Callback):
    """Losses, what was trained on, and random numbers that do not depend on the precision."""

    def __init__(self, seed: int) -> None:
        self.losses: list[Tensor] = []
        self.items = 0
        self.unit = "samples"
        self.digest = hashlib.sha256()
        self.seconds = 0.0
        self._seed = seed
        self._batches = 0
        self._in_epoch = 0
        self._began = math.nan
        self._patches: list[InstancePatch] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        set_seed(self._seed, -1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plugin = trainer.precision_plugin
        step = InstancePatch(pl_module, "training_step", lambda *a, **k: self._record(step.original(*a, **k)))
        convert = InstancePatch(plugin, "convert_input", lambda batch: convert.original(self._count(trainer, batch)))
        self._patches = [step, convert]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch and not self._batches:
            raise ValueError(_NOTHING_TRAINED)  # epochs without a batch would go on for ever
        self._in_epoch = 0
        set_seed(self._seed, -2, trainer.current_epoch)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if not self._batches:
            self._began = time.perf_counter()
        set_seed(self._seed, self._batches, 0)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        set_seed(self._seed, self._batches, 1)
        self._batches += 1

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.losses:
            float(self.losses[-1])  # waits for the device
        self.seconds = time.perf_counter() - self._began

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        while self._patches:
            self._patches.pop().restore()

    def _record(self, output: Any) -> Any:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach().float().mean())
        return output

    def _count(self, trainer: pl.Trainer, batch: Any) -> Any:
        """Sees the batch before the plugin changes its formats."""
        if trainer.training:
            items, self.unit = items_in(batch)
            self.items += items
            if self._in_epoch < _DIGESTED_BATCHES:
                for tensor in tensors_in(batch):
                    _digest(self.digest, "", tensor)
            self._in_epoch += 1
        return batch


def _validated(trainer: pl.Trainer, module: pl.LightningModule, source: TrainingData, monitor: str) -> float:
    trainer.validate(module, **source.validate_arguments(), verbose=False)
    metrics = trainer.callback_metrics
    if monitor not in metrics:
        raise ValueError(
            f"`monitor` {monitor!r} was not logged in validation; logged were {', '.join(sorted(metrics)) or 'none'}."
            " Pass one of these, or leave monitor out to compare the training loss."
        )
    return float(metrics[monitor])


_NOTHING_TRAINED = (
    "compare_precisions() trained on no batch: the data is empty, or training_step returned no loss. Pass data with at"
    " least one batch, and return the loss, or a dict with it under 'loss'."
)
_QUIET_OPTIONS = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,
    "val_check_interval": 10**9,
}
