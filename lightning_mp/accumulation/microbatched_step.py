"""One micro-batch as several forwards and backwards, one microbatch after the other, with the gradient of the whole."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from lightning_mp.accumulation.batch_split import Microbatch, merge_outputs
from lightning_mp.accumulation.controller import AccumulationController
from lightning_mp.accumulation.microbatch_logs import MicrobatchLogs
from lightning_mp.accumulation.ready_gradients import factor_of_backward, loss_with_gradients
from lightning_mp.modules.state import gradients_set_aside
from lightning_mp.tokens import batch_tokens
from lightning_mp.tokens.loss_average import LossAverage
from lightning_mp.tokens.loss_weighting import Weighting


def microbatch_shares(microbatches: Sequence[Microbatch], weighting: Weighting) -> list[float]:
    """The share of each microbatch in the mean of its micro-batch, by tokens or by samples; they add up to 1.

    Tokens that lie on a device are waited for. A micro-batch without a target token is shared by samples.
    """
    counts: list[Any] = [microbatch.samples for microbatch in microbatches]
    if weighting.weight_by == "token" and len(microbatches) > 1:
        tokens = [torch.as_tensor(weighting.measure(microbatch.batch).tokens) for microbatch in microbatches]
        on_host = torch.stack(tokens).tolist()
        counts = on_host if sum(on_host) else counts
    total = sum(counts)
    return [count / total for count in counts]


def weighting_of(trainer: "pl.Trainer", first_batch: Any, shifts: Callable[[], bool]) -> Weighting:
    """How microbatches are weighed: as the run's micro-batches are, else by tokens if there are any, or by samples."""
    controller = AccumulationController.of(trainer)
    if controller is not None and controller.weighting is not None and controller.weighting.weight_by is not None:
        return controller.weighting
    return Weighting("auto").resolved(first_batch, shifted=shifts())


class MicrobatchedStep:
    r"""Runs the microbatches of a micro-batch.

    .. math:: L = \sum_j \frac{n_j}{n} L_j, \qquad G = \sum_j \nabla \Big( \frac{n_j}{n} L_j \Big)

    where :math:`L_j` is the mean loss of microbatch :math:`j` over its :math:`n_j` items. Backwards run at once, scaled
    as Lightning's own will be, into empty gradients; what the window has gathered before is not touched.
    """

    def __init__(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", training_step: Callable[..., Any]
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._training_step = training_step

    def run(
        self,
        microbatches: Sequence[Microbatch],
        shares: Sequence[float],
        logs: MicrobatchLogs,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """What the training step would have returned for the whole, its loss with the gradients ready."""
        parameters = [p for p in self._pl_module.parameters() if p.requires_grad]
        ran: list[int] = []
        outputs: list[Any] = []
        losses: list[Tensor] = []
        counts: list[int | Tensor | None] = []
        factor: Tensor | None = None
        with gradients_set_aside(parameters):
            for index, (microbatch, share) in enumerate(zip(microbatches, shares, strict=True)):
                if share == 0:
                    continue
                logs.begin_microbatch(index)
                output = self._training_step(microbatch.batch, *args, **kwargs)
                if output is None:
                    continue
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor):
                    return output  # Lightning says what is wrong with it
                # A loss that is a sum over a number that the batch names needs no weight: it adds up.
                weight = 1.0 if batch_tokens.declared_divisor(microbatch.batch) is not None else share
                if factor is None:
                    factor = factor_of_backward(self._trainer, loss)
                averages = LossAverage.of(loss / 1)
                counts.append(averages[0].count(loss / 1) if len(averages) == 1 else None)
                losses.append(self._backward(loss, weight, factor))
                ran.append(index)
                outputs.append(_without_loss(output))
                del output, loss
            with_gradient = [p for p in parameters if p.grad is not None]
            computed = [p.grad for p in with_gradient if p.grad is not None]
        if factor is None:
            return None
        total = losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)
        known = [count for count in counts if count is not None]
        averaged_over = sum(known[1:], known[0]) if len(known) == len(counts) else None
        loss = loss_with_gradients(total, with_gradient, computed, factor, averaged_over)
        ran_share = sum(shares[index] for index in ran)
        output = merge_outputs(outputs, [microbatches[i].samples for i in ran], [shares[i] / ran_share for i in ran])
        return loss if output is None else {**output, "loss": loss}

    def _backward(self, loss: Tensor, weight: float, factor: Tensor) -> Tensor:
        """Runs one microbatch's backward as the precision plugin does; returns the weighted loss without its graph."""
        whole = weight == 1
        device_type = self._pl_module.device.type
        # The training step runs under autocast, a backward does not, and keeps no cast weight alive that it has used.
        torch.clear_autocast_cache()
        with torch.autocast(device_type, enabled=False):
            seed = loss * factor if whole else loss * (factor * weight)
            self._trainer.precision_plugin.backward(seed, self._pl_module, self._trainer.optimizers[0])
        return loss.detach() if whole else loss.detach() * weight


def _without_loss(output: Any) -> dict[str, Any] | None:
    """The other entries of a training step's output, without graph; None if it was nothing but a loss."""
    if not isinstance(output, Mapping):
        return None
    others = {key: value for key, value in output.items() if key != "loss"}
    detached: dict[str, Any] = apply_to_collection(others, Tensor, Tensor.detach, allow_frozen=True)
    return detached
