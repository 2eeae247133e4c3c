"""One micro-batch as several forwards and backwards, one microbatch after the other, with the gradient of the whole.

Also here: what it logs while microbatches run, and what to do when memory runs out.
"""

import gc
import inspect
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor
from torchmetrics import Metric

from lightning_mp.accumulation.batch_split import Microbatch, merge_outputs
from lightning_mp.accumulation.controller import AccumulationController
from lightning_mp.accumulation.ready_gradients import factor_of_backward, loss_with_gradients
from lightning_mp.core.patches import Patches
from lightning_mp.modules.state import gradients_set_aside
from lightning_mp.tokens import batch_tokens
from lightning_mp.tokens.loss_weighting import Weighting

if TYPE_CHECKING:
    from lightning_mp.tokens.loss_items import Items, Unknown

_SIGNATURE = inspect.signature(pl.LightningModule.log)
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def merge_logged(values: Sequence[Any], shares: Sequence[float], reduce_fx: Any = "mean") -> Any:
    """One logged value from those of the microbatches: their mean by ``shares``, or what ``reduce_fx`` says.

    >>> import torch
    >>> merge_logged([torch.tensor(1.0), 3.0], [1, 3]), merge_logged([1.0, 3.0], [1, 3], "max")
    (tensor(2.5000), tensor(3.))
    """
    if len(values) == 1 or isinstance(values[-1], Metric):
        return values[-1]
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    tensors = torch.stack([torch.as_tensor(value, device=device) for value in values])
    if name in _REDUCTIONS:
        return _REDUCTIONS[name](tensors)
    floating = tensors if tensors.is_floating_point() else tensors.to(torch.get_default_dtype())
    weights = torch.tensor(shares, dtype=torch.float64) / sum(shares)
    return (floating * weights.to(floating).reshape(-1, *[1] * (floating.ndim - 1))).sum(0)


class MicrobatchLogs:
    """Replaces ``self.log`` of a module for a whole fit; while :attr:`keeps` is set it writes down instead of logging.

    It is one object for all micro-batches, so that a compiled training step need not be compiled again.
    """

    def __init__(self, pl_module: "pl.LightningModule") -> None:
        self._pl_module = pl_module
        self.keeps = False
        # (name, how often it was logged in its microbatch before) -> (microbatch, arguments)
        self._calls: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
        self._repeats: dict[str, int] = defaultdict(int)
        self._microbatch = 0
        self._method = Patches.of(pl_module.trainer).replace(pl_module, "log", self._note)

    def begin_microbatch(self, microbatch: int) -> None:
        """What is logged from here on belongs to this microbatch."""
        self._microbatch = microbatch
        self._repeats.clear()

    def clear(self) -> None:
        """Forgets what was written down: the attempt failed."""
        self._calls.clear()

    def _note(self, *args: Any, **kwargs: Any) -> None:
        if not self.keeps:
            self._method.original(*args, **kwargs)
            return
        arguments = dict(_SIGNATURE.bind(self._pl_module, *args, **kwargs).arguments)
        del arguments["self"]
        if isinstance(arguments["value"], Tensor):
            arguments["value"] = arguments["value"].detach()
        name = arguments["name"]
        self._calls.setdefault((name, self._repeats[name]), []).append((self._microbatch, arguments))
        self._repeats[name] += 1

    def flush(self, shares: Sequence[float]) -> None:
        """Logs every value once, in the order of its first call; ``shares`` weigh the microbatches."""
        for calls in self._calls.values():
            arguments = dict(calls[-1][1])
            values = [call["value"] for _, call in calls]
            weights = [shares[microbatch] for microbatch, _ in calls]
            arguments["value"] = merge_logged(values, weights, arguments.get("reduce_fx", "mean"))
            if arguments.get("batch_size") is not None:
                arguments["batch_size"] = sum(call["batch_size"] for _, call in calls)
            self._method.original(**arguments)
        self._calls.clear()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out.

    That is ``torch.OutOfMemoryError`` (CUDA's and other accelerators' allocator), cuBLAS that finds no room for its
    handle, what Lightning's batch-size finder takes for one (also cuDNN's "not supported" for inputs that are too
    large), and torch's CPU allocator, which speaks of "not enough memory" or "can't allocate memory". Python's own
    ``MemoryError`` is not: it comes from code outside of torch, a smaller microbatch need not help.

    >>> import torch
    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(RuntimeError("shape"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError) or is_oom_error(error):
        return True
    text = str(error)
    cpu = "DefaultCPUAllocator" in text and ("not enough memory" in text or "can't allocate memory" in text)
    return isinstance(error, RuntimeError) and (cpu or "CUBLAS_STATUS_ALLOC_FAILED" in text)


def forget_attempt(error: BaseException) -> None:
    """Drops the local variables of all frames that an error came through: they hold the graph and its activations."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__


def free_cached_memory(device: torch.device) -> None:
    """Gives the blocks that torch's allocator keeps back to the device, where it keeps any."""
    torch.clear_autocast_cache()
    if device.type == "cuda":
        # Cycles in a user's code may still hold tensors.
        gc.collect()
        torch.cuda.empty_cache()


def smaller_size(size: int, min_size: int) -> int | None:
    """Half of ``size``, rounded up, but not below ``min_size``; None if that is no smaller.

    >>> [smaller_size(size, 2) for size in (8, 5, 3, 2)]
    [4, 3, 2, None]
    """
    smaller = max(-(-size // 2), min_size)
    return smaller if smaller < size else None


def advice_when_out_of_memory(sizes: list[int], min_size: int) -> str:
    """The note that is added to the error of a run that could not be saved."""
    tried = ", ".join(str(size) for size in sizes)
    return (
        f"MicroBatchOnOOM: out of memory with at most {tried} samples at a time, and min_size={min_size} allows no"
        " fewer. Use ActivationCheckpointing(...), shorter samples, a lower precision, an optimizer with less state,"
        " or strategy='fsdp' without this callback."
    )


def microbatch_shares(microbatches: Sequence[Microbatch], weighting: Weighting) -> list[float]:
    """The share of each microbatch in the mean of its micro-batch, by tokens or by samples; they add up to 1.

    Tokens that lie on a device are waited for. A micro-batch without a target token is shared by samples.
    """
    counts: list[Any] = [microbatch.samples for microbatch in microbatches]
    if weighting.weight_by == "token" and len(microbatches) > 1:
        items = [torch.as_tensor(weighting.measure(microbatch.batch).items) for microbatch in microbatches]
        on_host = torch.stack(items).tolist()
        counts = on_host if sum(on_host) else counts
    total = sum(counts)
    return [count / total for count in counts]


def weighting_of(trainer: "pl.Trainer", first_batch: Any, shifts: Callable[[], bool]) -> Weighting:
    """How microbatches are weighed: as the run's micro-batches are, else by tokens if there are any, or by samples."""
    controller = AccumulationController.of(trainer)
    if controller is not None and controller.weighting is not None and controller.weighting.weight_by is not None:
        return controller.weighting
    return Weighting("auto").resolved(first_batch, shifted=shifts())


def run_microbatches(
    pl_module: "pl.LightningModule",
    training_step: Callable[..., Any],
    microbatches: Sequence[Microbatch],
    shares: Sequence[float],
    logs: MicrobatchLogs,
) -> Any:
    r"""What the training step would have returned for the whole micro-batch, its loss with the gradients ready.

    .. math:: L = \sum_j \frac{n_j}{n} L_j, \qquad G = \sum_j \nabla \Big( \frac{n_j}{n} L_j \Big)

    where :math:`L_j` is the mean loss of microbatch :math:`j` over its :math:`n_j` items. Backwards run at once, scaled
    as Lightning's own will be, into empty gradients; what the window has gathered before is not touched.
    """
    parameters = [p for p in pl_module.parameters() if p.requires_grad]
    ran: list[int] = []
    outputs: list[Any] = []
    losses: list[Tensor] = []
    from lightning_mp.tokens.loss_items import read_items

    readings: list[Items | Unknown] = []
    factor: Tensor | None = None
    with gradients_set_aside(parameters):
        for index, (microbatch, share) in enumerate(zip(microbatches, shares, strict=True)):
            if share == 0:
                continue
            logs.begin_microbatch(index)
            output = training_step(microbatch.batch)
            if output is None:
                continue
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor):
                return output  # Lightning says what is wrong with it
            # A loss that is a sum over a number that the batch names needs no weight: it adds up.
            weight = 1.0 if batch_tokens.declared_divisor(microbatch.batch) is not None else share
            if factor is None:
                factor = factor_of_backward(pl_module.trainer, loss)
            readings.append(read_items(loss))
            losses.append(_backward(pl_module, loss, weight, factor))
            ran.append(index)
            outputs.append(_without_loss(output))
            del output, loss
        with_gradient = [p for p in parameters if p.grad is not None]
        computed = [p.grad for p in with_gradient if p.grad is not None]
    if factor is None:
        return None
    total = losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)
    loss = loss_with_gradients(total, with_gradient, computed, factor, _joined(readings))
    ran_share = sum(shares[index] for index in ran)
    output = merge_outputs(outputs, [microbatches[i].samples for i in ran], [shares[i] / ran_share for i in ran])
    return loss if output is None else {**output, "loss": loss}


def _joined(readings: "Sequence[Items | Unknown]") -> "Items | Unknown":
    """The items of a loss whose parts have these."""
    from lightning_mp.tokens.loss_items import Items, Unknown

    joined = readings[0]
    for reading in readings[1:]:
        if isinstance(joined, Unknown) or isinstance(reading, Unknown):
            return joined if isinstance(joined, Unknown) else reading
        if [mean.kind for mean in joined.means] != [mean.kind for mean in reading.means]:
            return Unknown("parts of a micro-batch count different items")
        pairs = zip(joined.means, reading.means, strict=True)
        joined = Items(tuple(replace(one, total=one.total + other.total) for one, other in pairs), joined.form)
    return joined


def _backward(pl_module: "pl.LightningModule", loss: Tensor, weight: float, factor: Tensor) -> Tensor:
    """Runs one microbatch's backward as the precision plugin does; returns the weighted loss without its graph."""
    whole = weight == 1
    device_type = pl_module.device.type
    # The training step runs under autocast, a backward does not, and keeps no cast weight alive that it has used.
    torch.clear_autocast_cache()
    with torch.autocast(device_type, enabled=False):
        seed = loss * factor if whole else loss * (factor * weight)
        pl_module.trainer.precision_plugin.backward(seed, pl_module, pl_module.trainer.optimizers[0])
    return loss.detach() if whole else loss.detach() * weight


def _without_loss(output: Any) -> dict[str, Any] | None:
    """The other entries of a training step's output, without graph; None if it was nothing but a loss."""
    if not isinstance(output, Mapping):
        return None
    others = {key: value for key, value in output.items() if key != "loss"}
    detached: dict[str, Any] = apply_to_collection(others, Tensor, Tensor.detach, allow_frozen=True)
    return detached
