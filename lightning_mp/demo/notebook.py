"""What the notebooks share: a quiet Trainer for a CPU, what it recorded, tables, and bytes that are counted."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_mp.diagnostics import StepOutcome
from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.training.activation_checkpointing.cost import StorageBytes
from lightning_mp.training.gradients.gradient_ops import local_shard

#: The colour of a number format in every figure.
COLOURS = {"fp32": "black", "bf16": "tab:blue", "fp16": "tab:orange", "fp8_e5m2": "tab:green", "fp8_e4m3fn": "tab:red"}
_DEFAULTS: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def set_up() -> None:
    """Silences Lightning, sets the style of figures, and uses one thread, as fast as two for small models."""
    import matplotlib.pyplot as plt

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    plt.rcParams.update({"figure.figsize": (9, 3.6), "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"legend.frameon": False, "figure.constrained_layout.use": True})


class Recorder(Callback):
    """Records the loss of every micro-batch, the outcome of every optimizer step, and the time that steps take."""

    trainer: "pl.Trainer"

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._clock: list[float] = []
        self.loss_scales: list[float] = []
        self.skipped: list[bool] = []

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """A hook of lightning_mp: what became of the step."""
        self.loss_scales.append(outcome.loss_scale)
        self.skipped.append(outcome.skipped)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the module's ``mean_loss``, or else its ``loss``: the mean over ranks."""
        loss = outputs.get("mean_loss", outputs["loss"]).detach()
        self._losses.append(trainer.strategy.reduce(loss, reduce_op="mean"))
        if (batch_idx + 1) % max(1, trainer.accumulate_grad_batches) == 0:
            self._clock.append(time.process_time())  # of this process: other work on the machine does not count

    @property
    def losses(self) -> Tensor:
        """Shape ``[micro-batches]``."""
        return torch.stack(self._losses)

    @property
    def seconds_per_step(self) -> float:
        """Median CPU time; the first step, which warms up, is left out."""
        return torch.tensor(self._clock, dtype=torch.float64).diff().median().item()


def train(module: "pl.LightningModule", data: Any, *callbacks: Callback, **settings: Any) -> Recorder:
    """Fits a module on the CPU without output; one epoch by default. A list of batches is taken as it is."""
    recorder = next((callback for callback in callbacks if isinstance(callback, Recorder)), None) or Recorder()
    others = [callback for callback in callbacks if callback is not recorder]
    recorder.trainer = pl.Trainer(callbacks=[recorder, *others], **(_DEFAULTS | settings))
    batches: Any = data
    recorder.trainer.fit(module, DataLoader(batches, batch_size=None) if type(data) is list else data)
    return recorder


def smooth(values: Tensor, window: int) -> Tensor:
    """Means over a window that moves along the values, shape ``[values - window + 1]``."""
    return values.unfold(0, window, 1).mean(dim=1)


class Table:
    """A table that a notebook shows as one."""

    def __init__(self, header: Iterable[object], rows: Iterable[Iterable[object]]) -> None:
        columns = [*header]
        self._lines: list[list[object]] = [columns, ["---" for _ in columns], *([*row] for row in rows)]

    def _repr_markdown_(self) -> str:
        return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in self._lines)


def saved_bytes(module: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes that autograd keeps for the backward of a forward, each storage once, weights left out."""
    weights, kept = StorageBytes(), StorageBytes()
    tensors: list[Tensor] = []  # alive until all are counted: a freed address is used again

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor)
        tensors.append(tensor)
        return tensor

    for weight in module.parameters():
        weights.add(weight)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return (kept - weights).total_bytes


class ThirdStep(Recorder):
    """Records also what the third step of a run on two ranks keeps and sends on this rank, in bytes.

    ``sent`` has the bytes that go to the other rank in each call of each collective operation, as in a ring.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, int] = {}
        self.sent: dict[str, list[int]] = {}
        self._counting = private_dispatch_api.observe_dispatch(self._count_sent)

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Starts counting."""
        if batch_idx == 2:
            self._counting.__enter__()

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        """Ends counting, and adds up what this rank keeps."""
        if trainer.global_step == 2:
            self._counting.__exit__(None, None, None)
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            moments = [value for weight in weights for value in optimizer.state[weight].values() if value.dim()]
            tensors = {"weights": weights, "gradients": [weight.grad for weight in weights], "AdamW's moments": moments}
            self.kept = {name: sum(local_shard(value).nbytes for value in values) for name, values in tensors.items()}

    def _count_sent(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        namespace, _, name = operation._schema.name.partition("::")
        if "c10d" not in namespace:
            return
        sizes = [tensor.nbytes for tensor in tensors_in(args)]
        sent = {
            "all-reduce": sum(sizes),  # half of it to be summed, half of the sum
            "all-gather": min(sizes, default=0),  # its own part
            "reduce-scatter": max(sizes, default=0) // 2,  # the part that the other rank sums
            "send": sum(sizes),
        }
        for kind, size in sent.items():
            if name.replace("_", "").startswith(kind.replace("-", "")):
                self.sent.setdefault(kind, []).append(size)
