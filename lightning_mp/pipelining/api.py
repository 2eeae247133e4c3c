"""Functions that a LightningModule calls in its steps, with and without PipelineParallelStrategy."""

from collections.abc import Mapping
from typing import Any, Protocol, cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_mp.pipelining.layers import loss_of, pipeline_input, read_layers, run_layers


class _Runner(Protocol):
    def loss(self, batch: Any) -> dict[str, Tensor]: ...

    def output(self, batch: Any) -> Any: ...


def pipelined_loss(module: "pl.LightningModule", batch: Any) -> Tensor:
    """The mean loss of a batch: ``module.pipeline_loss`` of the output of ``module.pipeline_layers``.

    Under :class:`~lightning_mp.strategies.PipelineParallelStrategy` the batch goes through the stages in microbatches,
    and all stages return the same loss. Elsewhere the layers run one after the other on the whole batch.

    Args:
        module: a LightningModule with ``pipeline_layers`` and ``pipeline_loss``.
        batch: the batch that the step received.

    Returns:
        A scalar tensor that can be logged, combined with others and returned from ``training_step``.

    Raises:
        MisconfigurationException: if the module does not define its layers and loss.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Net(pl.LightningModule):
        ...     pipeline_layers = ("up", "down")
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 1)
        ...     def pipeline_loss(self, output, batch):
        ...         return nn.functional.mse_loss(output, batch[1])
        ...     def training_step(self, batch, batch_idx):
        ...         loss = pipelined_loss(self, batch)
        ...         self.log("train_loss", loss)
        ...         return loss
        >>> pipelined_loss(Net(), (torch.ones(3, 2), torch.ones(3, 1))).shape
        torch.Size([])
    """
    return pipelined_metrics(module, batch)["loss"]


def pipelined_metrics(module: "pl.LightningModule", batch: Any) -> Mapping[str, Tensor]:
    """The mean loss of a batch, and the other scalars that ``pipeline_loss`` returns, such as an accuracy.

    All of them must be means: over microbatches they are weighted like the loss, by tokens or by samples.

    Args:
        module: as for :func:`pipelined_loss`.
        batch: the batch that the step received.
    """
    runner = _runner_of(module)
    if runner is not None:
        return runner.loss(batch)
    output = run_layers(read_layers(module), pipeline_input(module, batch), batch)
    return loss_of(module, output, batch)


def pipelined_output(module: "pl.LightningModule", batch: Any) -> Any:
    """The output of the last layer for the whole batch, without gradients; for ``predict_step``.

    Under PipelineParallelStrategy it is sent to all stages, so for a large vocabulary, return only the values that
    you need from ``pipeline_loss`` instead.

    Args:
        module: as for :func:`pipelined_loss`.
        batch: the batch that the step received.
    """
    runner = _runner_of(module)
    if runner is not None:
        return runner.output(batch)
    with torch.no_grad():
        return run_layers(read_layers(module), pipeline_input(module, batch), batch)


def _runner_of(module: "pl.LightningModule") -> _Runner | None:
    try:
        strategy = module.trainer.strategy
    except RuntimeError:
        return None  # no Trainer
    return cast(_Runner | None, getattr(strategy, "pipeline_runner", None))
