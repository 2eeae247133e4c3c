"""States of the torchmetrics of a module, which no ``state_dict`` holds unless they are persistent."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_mp.core.private_loop_api import set_metric_state


def metric_states(module: nn.Module) -> dict[str, Any]:
    """Of those that were updated since they were reset, by name.

    Example:
        >>> from torchmetrics.aggregation import MeanMetric
        >>> module, other = nn.ModuleDict({"mean": MeanMetric()}), nn.ModuleDict({"mean": MeanMetric()})
        >>> module["mean"].update(3.0)
        >>> restore_metric_states(other, metric_states(module))
        >>> float(other["mean"].compute())
        3.0
    """
    return {
        name: {"states": _moved(metric.metric_state, torch.device("cpu"), copy=True), "updates": metric.update_count}
        for name, metric in module.named_modules()
        if isinstance(metric, Metric) and metric.update_count
    }


def restore_metric_states(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Has metrics of those names continue; metrics that the module does not have any more are left out."""
    metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    for name in saved.keys() & metrics.keys():
        metric = metrics[name]
        set_metric_state(metric, _moved(saved[name]["states"], metric.device), saved[name]["updates"])


def _moved(value: Any, device: torch.device, *, copy: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {key: _moved(inner, device, copy=copy) for key, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, device, copy=copy) for inner in value]
    return value.detach().to(device, copy=copy) if isinstance(value, Tensor) else value
