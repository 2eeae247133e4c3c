"""What a run was made of and what came of it: its random numbers, its batches, its losses."""

import hashlib
import math
import random
import time
from collections.abc import Mapping
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_mp.comparison.training_data import items_in
from lightning_mp.core.nested_tensors import tensors_in
from lightning_mp.core.patches import Patches

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
        self.items = 0
        self.unit = "samples"
        self.digest = hashlib.sha256()
        self.seconds = 0.0
        self._seed = seed
        self._batches = 0
        self._in_epoch = 0
        self._has_loss = False
        self._began = math.nan

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Random numbers of the set-up."""
        set_seed(self._seed, -1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Records losses before Lightning divides them, and batches before the plugin converts them."""
        plugin, training_step = trainer.precision_plugin, pl_module.training_step

        @wraps(training_step)  # Lightning looks at its arguments
        def step_and_record(*args: Any, **kwargs: Any) -> Any:
            return self._record(training_step(*args, **kwargs))

        patches = Patches.of(trainer)
        patches.replace(pl_module, "training_step", step_and_record)
        convert = patches.replace(plugin, "convert_input", lambda batch: convert.original(self._count(trainer, batch)))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Random numbers of the order of the data."""
        if trainer.current_epoch:
            self.check(trainer)  # epochs without a step would continue for ever
        self._in_epoch = 0
        set_seed(self._seed, -2, trainer.current_epoch)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Random numbers of the batch."""
        if not self._batches:
            self._began = time.perf_counter()
        self._has_loss = False
        set_seed(self._seed, self._batches, 0)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Random numbers until the next batch."""
        set_seed(self._seed, self._batches, 1)
        self._batches += 1

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
            items, self.unit = items_in(batch)
            self.items += items
            if self._in_epoch < _DIGESTED_BATCHES:
                for tensor in tensors_in(batch):
                    _digest(self.digest, "", tensor)
            self._in_epoch += 1
        return batch
