"""What the parts of a batch log, logged once as the whole batch would have logged it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

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

    It holds back what a batch in one part logs, too: ranks meet for ``sync_dist=True`` after their backwards, however
    many parts each of them has run.
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
        """What is logged from here on belongs to this part."""
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

    def flush(self, weights: Sequence[float | Tensor], losses: Sequence[Tensor | None], divisor: int) -> None:
        """Logs every value once.

        Args:
            weights: what each part weighs in a mean. A value that was logged with ``batch_size=`` weighs that.
            losses: the loss of each part over ``divisor``, if the loss of the whole is their sum; else none. A value
                that is the loss in all parts is added up, too.
            divisor: what Lightning has divided losses by.
        """
        self.keeps = False
        calls, self._calls = self._calls, {}
        for (fx, name, _), noted in calls.items():
            parts, values, arguments = zip(*noted, strict=True)
            merged = dict(arguments[-1])
            given = [one.get("batch_size") for one in arguments]
            if given[-1] is not None:
                merged["batch_size"] = sum(given)
            by = given if given[-1] is not None else [weights[part] for part in parts]
            value = merge_logged(values, by, merged.get("reduce_fx", "mean"))
            if losses and len(values) > 1:
                value = _sum_if_losses(values, [losses[part] for part in parts], divisor, value)
            self._log.original(fx, name, value, **merged)


def _sum_if_losses(values: Sequence[Any], losses: Sequence[Tensor | None], divisor: int, otherwise: Any) -> Any:
    """The sum of values that are the losses, each of its part."""
    pairs = [(v, loss) for v, loss in zip(values, losses, strict=True) if isinstance(v, Tensor) and loss is not None]
    if len(pairs) < len(values) or any(v.numel() != 1 for v, _ in pairs):
        return otherwise
    flat = torch.stack([v.reshape(()) for v, _ in pairs])
    are_losses = (flat / divisor == torch.stack([loss.reshape(()).to(flat) for _, loss in pairs])).all()
    return torch.where(are_losses, flat.sum(), otherwise)
