"""Averaged weights (EMA, SWA) beside 16-bit weights, in full precision."""

import itertools
from collections.abc import Iterator

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_mp.core import private_api, private_loop_api
from lightning_mp.core.patches import Patches
from lightning_mp.core.precisions import HALF_DTYPES
from lightning_mp.precision.masters.store import MasterStore


class FullAverages:
    """Keeps the averages of Lightning's callbacks in fp32 for a run, and lets ``WeightAveraging`` average masters.

    An average moves by a thousandth of the distance to the weights, which 16 bit rounds away. So an average that was
    copied from 16-bit weights is widened, and what is averaged are the masters, where a weight has one. For a
    validation Lightning exchanges the average with the weights of the module, and back: what the module could not hold
    is put back after it, from a copy that lives as long as the validation.
    """

    def __init__(self, trainer: "pl.Trainer", masters: MasterStore) -> None:
        self._masters = masters
        self._patches = Patches.of(trainer)
        for callback in private_api.callbacks_of(trainer):
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                average = private_loop_api.average_model_of(callback)
                if average is not None:
                    _widen_(average)
                if isinstance(average, AveragedModel):
                    self._average_masters(average)
                    self._keep_over_validation(callback, average)

    def _average_masters(self, average: AveragedModel) -> None:
        def update_parameters(model: nn.Module) -> None:
            method.original(_FullPrecision(model, average.module, self._masters))

        method = self._patches.replace(average, "update_parameters", update_parameters)

    def _keep_over_validation(self, callback: pl.Callback, average: AveragedModel) -> None:
        kept: list[tuple[Tensor, Tensor]] = []

        def on_validation_epoch_start(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
            pairs = zip(_tensors(average.module), _tensors(pl_module), strict=True)
            kept[:] = [(ours, ours.clone()) for ours, theirs in pairs if ours.dtype != theirs.dtype]
            start.original(trainer, pl_module)

        def on_validation_epoch_end(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
            end.original(trainer, pl_module)
            for tensor, value in kept:
                tensor.copy_(value)
            kept.clear()

        start = self._patches.replace(callback, "on_validation_epoch_start", on_validation_epoch_start)
        end = self._patches.replace(callback, "on_validation_epoch_end", on_validation_epoch_end)


class _FullPrecision(nn.Module):
    """What an ``AveragedModel`` reads of a model: its parameters, masters instead of 16-bit weights, and buffers."""

    def __init__(self, model: nn.Module, average: nn.Module, masters: MasterStore) -> None:
        super().__init__()
        self._read = model, average, masters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """In fp32, where the average is."""
        model, average, masters = self._read
        for parameter, averaged in zip(model.parameters(), average.parameters(), strict=True):
            value = masters.get(parameter) if parameter in masters else parameter.detach()
            yield nn.Parameter(value.to(averaged.dtype), requires_grad=False)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """In the dtypes of the average."""
        model, average, _ = self._read
        for buffer, averaged in zip(model.buffers(), average.buffers(), strict=True):
            yield buffer.to(averaged.dtype)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return (tensor.detach() for tensor in itertools.chain(module.parameters(), module.buffers()))


def _widen_(average: nn.Module) -> None:
    for parameter in average.parameters():
        if parameter.dtype in HALF_DTYPES:
            parameter.data = parameter.data.float()
