"""Values of ``self.log`` while microbatches run: kept back, and logged once, as the mean over them."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_mp.core.patches import Patches

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
