"""What the parts of a batch log, logged once as the whole batch would have logged it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_mp.accumulation.batch_split import weighted_mean
from lightning_mp.core import private_loop_api

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def merge_logged(values: Sequence[Any], weights: Sequence[float | Tensor], reduce_fx: Any = "mean") -> Any:
    """One logged value from those of the parts: their mean by ``weights``, or what ``reduce_fx`` says.

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
    return weighted_mean(list(floating), weights)


class PartLogs:
    """Holds back what ``self.log`` is given while parts run; logs it once afterwards, in the order of first calls.

    It also holds back what a batch in one part logs: ranks reduce ``sync_dist=True`` values after their backwards,
    however many parts each has run.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self.keeps = False
        # (hook, name, how often it was logged in its part before) -> (part, value, other arguments)
        self._calls: dict[tuple[str, str, int], list[tuple[int, Any, dict[str, Any]]]] = {}
        self._repeats: dict[tuple[str, str], int] = defaultdict(int)
        self._part = 0
        self._log = private_loop_api.replace_logging(trainer, self._note)

    def begin(self) -> None:
        """The parts of a batch begin, maybe anew."""
        self.keeps = True
        self._calls.clear()

    def begin_part(self, part: int) -> None:
        """What is logged from now on belongs to this part."""
        self._part = part
        self._repeats.clear()

    def drop(self) -> None:
        """Nothing of it is logged: the attempt failed, or the batch was logged before."""
        self.keeps = False
        self._calls.clear()

    def _note(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        if not self.keeps:
            self._log.original(fx, name, value, **arguments)
            return
        if isinstance(value, Tensor):
            value = value.detach()
        self._repeats[fx, name] += 1
        self._calls.setdefault((fx, name, self._repeats[fx, name]), []).append((self._part, value, arguments))

    def flush(self, weights: Sequence[float | Tensor], losses: "PartLosses") -> None:
        """Logs every value once.

        A value that is the loss in all its parts is merged as the loss is. Any other one is merged by ``batch_size=``
        if it was logged with that, else by what parts weigh.
        """
        self.keeps = False
        calls, self._calls = self._calls, {}
        for (fx, name, _), noted in calls.items():
            parts, values, arguments = zip(*noted, strict=True)
            merged, reduce_fx = dict(arguments[-1]), arguments[-1].get("reduce_fx", "mean")
            by = [weights[part] for part in parts]
            sizes = [one.get("batch_size") for one in arguments]
            if sizes[-1] is not None:
                merged["batch_size"] = sum(sizes)
            value = merge_logged(values, by if sizes[-1] is None else sizes, reduce_fx)
            if len(values) > 1 and (losses.add_up or sizes[-1] is not None):
                value = losses.merged_if_losses(parts, values, by, value)
            self._log.original(fx, name, value, **merged)


class PartLosses(NamedTuple):
    """The losses of parts, divided by Lightning."""

    values: Sequence[Tensor | None]
    divisor: int  # by which
    add_up: bool  # the loss of the whole is their sum

    def merged(self, parts: Sequence[int], weights: Sequence[float | Tensor]) -> Tensor | None:
        """The loss of the whole from those of some parts; None without any."""
        known = [(loss, by) for part, by in zip(parts, weights, strict=True) if (loss := self.values[part]) is not None]
        if not known:
            return None
        losses, by = zip(*known, strict=True)
        return torch.stack(losses).sum(0) if self.add_up else weighted_mean(losses, by)

    def merged_if_losses(
        self, parts: Sequence[int], values: Sequence[Any], weights: Sequence[float | Tensor], otherwise: Any
    ) -> Any:
        """The loss of the whole, if these values are the losses of the parts; no wait for the device."""
        losses = [loss for part in parts if (loss := self.values[part]) is not None]
        are_numbers = all(isinstance(value, Tensor) and value.numel() == 1 for value in values)
        if len(losses) < len(values) or not are_numbers:
            return otherwise
        flat, divided = torch.stack([v.reshape(()) for v in values]), torch.stack([loss.reshape(()) for loss in losses])
        whole = flat.sum() if self.add_up else weighted_mean(list(flat), weights)
        is_nan = flat.isnan() & divided.isnan()
        return torch.where(((flat / self.divisor == divided) | is_nan).all(), whole, otherwise)
