"""What the parts of a batch return and log, joined to what the whole batch would have returned and logged."""

from collections import Counter
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor
from torchmetrics import Metric

from lightning_mp.ground.core import private_loop_api


class RanPart(NamedTuple):
    """A part of a batch that has run."""

    output: ClosureResult  # without its graph, if there are several parts
    samples: int
    weight: float | Tensor  # in the mean of the batch
    has_backward: bool


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """The mean of floating-point tensors by weights; what weighs nothing is left out, even if it is NaN.

    >>> import torch
    >>> weighted_mean([torch.tensor(1.0), torch.tensor(4.0), torch.tensor(torch.nan)], [1, 2, 0])
    tensor(3.)
    """
    stacked = torch.stack(list(values))
    by = torch.stack([torch.as_tensor(weight, dtype=torch.float64, device=stacked.device) for weight in weights])
    # Where nothing is counted, the whole has the same NaN as its parts, or the same number.
    by = torch.where(by.sum() > 0, by, 1.0)
    by = (by / by.sum()).reshape(-1, *[1] * (stacked.ndim - 1)).to(stacked.dtype)
    return torch.where(by > 0, stacked * by, 0.0).sum(0)


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float | Tensor]) -> Any:
    """Joins what a step returned for each microbatch into what it might have returned for the whole.

    Tensors with one row per sample, and lists with one entry per sample, are joined. Floating-point numbers, and
    tensors of one shape, are averaged by ``weights``. Dicts, and other lists of one length, are joined entry by entry.
    Of anything else the last microbatch's is taken.

    >>> import torch
    >>> merge_outputs([{"acc": 0.5, "y": torch.ones(3)}, {"acc": 1.0, "y": torch.zeros(1)}], [3, 1], [3, 1])
    {'acc': 0.625, 'y': tensor([1., 1., 1., 0.])}
    """
    last = outputs[-1]
    if any(type(output) is not type(last) for output in outputs):
        return last
    if isinstance(last, dict):
        merged = copy(last)
        for key in [key for key in last if all(key in output for output in outputs)]:
            merged[key] = merge_outputs([output[key] for output in outputs], sizes, weights)
        return merged
    is_tensor, is_list = isinstance(last, Tensor), type(last) in (list, tuple)
    if is_list or (is_tensor and all(output.ndim for output in outputs)):
        have_rows = [len(output) for output in outputs] == list(sizes)
        # A pair of outputs and labels of two samples each is no list of two samples.
        is_pair = is_list and all(isinstance(e, Tensor) and e.ndim and len(e) == len(last) for e in last)
        if is_list and have_rows and not is_pair:
            return type(last)(entry for output in outputs for entry in output)
        if is_list and len({len(output) for output in outputs}) == 1:
            return type(last)(merge_outputs(entries, sizes, weights) for entries in zip(*outputs, strict=True))
        if is_tensor and have_rows and len({output.shape[1:] for output in outputs}) == 1:
            return torch.cat(list(outputs))
    if isinstance(last, float):
        return float(weighted_mean([torch.tensor(output, dtype=torch.float64) for output in outputs], weights))
    is_mean = is_tensor and last.is_floating_point() and len({output.shape for output in outputs}) == 1
    return weighted_mean(outputs, weights) if is_mean else last


def merged_output(ran: Sequence[RanPart], *, add_up: bool) -> ClosureResult:
    """What the closure of a whole batch returns; losses of parts are divided by Lightning as that of the whole is."""
    if len(ran) == 1:
        return ran[0].output
    outputs, samples, weights, _ = zip(*ran, strict=True)
    merged = ClosureResult(None, merge_outputs([output.extra for output in outputs], samples, weights))
    if known := [(one.output.loss, one.weight) for one in ran if one.output.loss is not None]:
        losses, by = zip(*known, strict=True)
        merged.loss = torch.stack(losses).sum(0) if add_up else weighted_mean(losses, by)
    return merged


def merge_logged(values: Sequence[Tensor], weights: Sequence[float | Tensor], reduce_fx: Any = "mean") -> Tensor:
    """One logged value from those of the parts: their mean by ``weights``, or what ``reduce_fx`` says.

    >>> import torch
    >>> values = [torch.tensor(1.0), torch.tensor(3.0)]
    >>> merge_logged(values, [1, 3]), merge_logged(values, [1, 3], "max")
    (tensor(2.5000), tensor(3.))
    """
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if name in ("sum", "max", "min"):
        reduced: Tensor = getattr(torch.stack(list(values)), name)()
        return reduced
    return weighted_mean([v if v.is_floating_point() else v.to(torch.get_default_dtype()) for v in values], weights)


class PartLogs:
    """Holds back what ``self.log`` is given while parts run; logs it once afterwards, in the order of first calls.

    It also holds back what a batch in one part logs: ranks reduce ``sync_dist=True`` values after their backwards,
    however many parts each has run.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        # (hook, name, how often it was logged in its part before) -> (part, value, other arguments)
        self._calls: dict[tuple[str, str, int], list[tuple[int, Any, dict[str, Any]]]] | None = None
        self._repeats: Counter[tuple[str, str]] = Counter()
        self._part = 0
        self._log = private_loop_api.replace_logging(trainer, self._note)

    def begin_part(self, part: int) -> None:
        """What is logged from now on belongs to this part of a batch; its first one may be repeated."""
        if part == 0:
            self._calls = {}
        self._part = part
        self._repeats.clear()

    def drop(self) -> None:
        """Nothing of it is logged: the attempt failed, or the batch was logged before."""
        self._calls = None

    def _note(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        if self._calls is None:
            self._log.original(fx, name, value, **arguments)
            return
        if isinstance(value, Metric):
            arguments["metric"], value = value, private_loop_api.batch_value(value)
        self._repeats[fx, name] += 1
        value = value.detach() if isinstance(value, Tensor) else value
        self._calls.setdefault((fx, name, self._repeats[fx, name]), []).append((self._part, value, arguments))

    def flush(self, ran: Sequence[RanPart], divisor: int, *, add_up: bool) -> None:
        """Logs every value once.

        A value that is the loss in all its parts is merged as the loss is, the batch value of a metric by samples, and
        any other one by ``batch_size=`` if it was logged with that, else by what parts weigh.
        """
        calls, self._calls = self._calls or {}, None
        for (fx, name, _), noted in calls.items():
            parts, values, arguments = zip(*noted, strict=True)
            logged, value, whole = [ran[part] for part in parts], values[-1], dict(arguments[-1])
            metric, weights = whole.pop("metric", None), [one.weight for one in logged]
            sizes = [one["batch_size"] for one in arguments]
            if whole["batch_size"] is not None and set(sizes) != {sum(one.samples for one in ran)}:
                whole["batch_size"] = sum(sizes)  # if it is not that of the whole
            if metric is not None:
                if len(values) > 1 and all(isinstance(value, Tensor) for value in values):
                    by = [one.samples for one in logged]
                    private_loop_api.set_batch_value(metric, merge_logged(values, by))
                value = metric
            elif len(values) > 1:
                by = weights
                if None not in sizes:  # the NaN of a mean over nothing is left out
                    by = [n * ~(v.isnan() & (w == 0)) for n, v, w in zip(sizes, values, weights, strict=True)]
                value = merge_logged(values, by, whole["reduce_fx"])
                losses = [one.output.loss.reshape(()) for one in logged if one.output.loss is not None]
                if len(losses) == len(values):
                    divided = torch.stack(values) / divisor
                    is_loss = torch.isclose(divided, torch.stack(losses).to(divided.dtype), equal_nan=True).all()
                    as_loss = merge_logged(values, weights, "sum" if add_up else "mean")
                    value = torch.where(is_loss, as_loss, value)
            self._log.original(fx, name, value, **whole)
