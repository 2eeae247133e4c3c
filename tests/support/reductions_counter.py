"""Counts reductions of sharded gradients between optimizer steps."""

from collections import Counter
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode


class CountReductions(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class ReductionsPerStep(Callback):
    """Reduce-scatters between optimizer steps."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_start(self, *_: Any) -> None:
        self.mode = CountReductions()
        self.mode.__enter__()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.counts.append(sum(n for name, n in self.mode.calls.items() if "reduce_scatter" in name))
        self.mode.calls.clear()

    def on_train_end(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)
