"""An optimizer's step on fake tensors: states and temporaries come from the optimizer's own code."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.half_dtypes import HALF_DTYPES
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.core.precisions import PrecisionSpec
from lightning_mp.monitors.step_memory.live_storages import LiveStorages
from lightning_mp.training.gradients.step_blocks import padded, step_blocks
from lightning_mp.training.optimizers.adam_moments import has_bf16_moments
from lightning_mp.training.optimizers.evaluations import evaluates_its_closure_once

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]

# A CPU's kernel that joins copies and rests casts both to the 32 bits of its result before it runs.
_JOINING_BYTES = 3 * 4
# torchao's step compiled for a CPU keeps both moments of a parameter in fp32, to find the largest number of each block.
_WIDENING_BYTES = 2 * 4


def make_optimizers(module: nn.Module, optimizer: str | OptimizerFactory | None) -> list[Optimizer]:
    """The optimizers of a module."""
    configure = getattr(module, "configure_optimizers", None)
    if optimizer is None and callable(configure):
        found = list(optimizers_in(_configured(module, configure)))
    else:
        found = [_factory(optimizer or "AdamW")([p for p in module.parameters() if p.requires_grad])]
    if not all(isinstance(one, Optimizer) for one in found):
        kinds = ", ".join(type(one).__name__ for one in found)
        raise ValueError(f"`optimizer` must make a torch.optim.Optimizer, got {kinds}. Pass a class or its name.")
    return found


def _configured(module: nn.Module, configure: Callable[[], Any]) -> Any:
    try:
        return configure()
    except RuntimeError as error:
        if "is not attached to a `Trainer`" not in str(error):
            raise
        raise ValueError(
            f"configure_optimizers of {type(module).__name__} reads self.trainer, and a memory estimate has none. Pass"
            " optimizer=, a class of torch.optim by its name or a function from parameters to an optimizer; on the"
            " command line --optimizer AdamW."
        ) from error


def _factory(optimizer: str | OptimizerFactory) -> OptimizerFactory:
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            raise ValueError(
                "`optimizer` must be a class of torch.optim by its name, such as 'AdamW', or a function from"
                f" parameters to an optimizer, got {optimizer!r}."
            )
        return optimizer
    classes = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if optimizer.lower() not in classes:
        raise ValueError(
            f"`optimizer` {optimizer!r} is not known. Use one of {', '.join(sorted(classes))}, or pass a function from"
            " parameters to an optimizer."
        )
    kind = classes[optimizer.lower()]

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        try:
            return kind(parameters, lr=1e-3)  # type: ignore[call-arg]  # every class has it
        except ValueError as error:
            raise ValueError(
                f"`optimizer` {optimizer!r} cannot take the parameters of this module ({error}). Pass another, or a"
                " function from parameters to an optimizer."
            ) from error

    return make


def optimizers_in(configured: Any) -> Iterable[Any]:
    """Of everything that Lightning lets ``configure_optimizers`` return."""
    if configured is None:
        return
    if isinstance(configured, Mapping):
        yield configured["optimizer"]
    elif isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], Sequence):
        yield from configured[0]
    elif isinstance(configured, Sequence):
        for one in configured:
            yield from optimizers_in(one)
    else:
        yield configured


class StandInOptimizer:
    """One optimizer over tensors on the meta device that represent the parameters, or their masters."""

    def __init__(self, optimizer: Optimizer, precision: PrecisionSpec, device_type: str) -> None:
        self.optimizer = optimizer
        self._precision = precision
        self._joining_bytes = _JOINING_BYTES if device_type == "cpu" else 0  # per element of a compressed master
        self._widening_bytes = _WIDENING_BYTES if device_type == "cpu" else 0  # per element of the largest 8-bit state
        self._of: list[tuple[Tensor, nn.Parameter, Tensor | None]] = []
        self._is_fused = any(group.get("fused") for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            if "foreach" in group and not group.get("fused") and group["foreach"] is None:
                group["foreach"] = device_type == "cuda"
            if group.get("fused") and not has_bf16_moments(optimizer):  # for which only the fused kernel runs
                group["fused"], group["foreach"] = False, False
            group["params"] = [self._stand_in(parameter) for parameter in group["params"]]
        self._stand_in_states()

    def _stand_in(self, parameter: Tensor) -> nn.Parameter:
        halved = parameter.dtype in HALF_DTYPES
        has_master = halved and parameter.requires_grad and self._precision.master_bytes > 0
        dtype = torch.float32 if has_master else parameter.dtype
        value = torch.empty(parameter.shape, dtype=dtype, device="meta")
        kept: Tensor | None = None
        if has_master:
            short = {1: torch.int8, 2: torch.int16}.get(self._precision.master_bytes)
            kept = torch.empty(padded(parameter.numel()), dtype=short, device="meta") if short else value
        stand_in = nn.Parameter(value, requires_grad=parameter.requires_grad)
        self._of.append((parameter, stand_in, kept))
        return stand_in

    def _stand_in_states(self) -> None:
        """States that the optimizer's constructor has made."""
        for parameter, stand_in, _ in self._of:
            state = self.optimizer.state.pop(parameter, None)
            if state is not None:
                self.optimizer.state[stand_in] = {
                    name: torch.empty_like(value, dtype=_of_master(value, parameter, stand_in), device="meta")
                    if isinstance(value, Tensor) and value.ndim
                    else value
                    for name, value in state.items()
                }

    @property
    def masters(self) -> list[Tensor]:
        """What is kept beside 16-bit weights."""
        return [kept for _, _, kept in self._of if kept is not None]

    @cached_property  # alive as long as the optimizer
    def padding(self) -> list[Tensor]:
        """What fills up the memory that copies and rests of compressed masters share, on the side of the copies."""
        return [
            torch.empty(kept.numel() - parameter.numel(), dtype=parameter.dtype, device="meta")
            for parameter, _, kept in self._of
            if kept is not None and not kept.is_floating_point()
        ]

    @property
    def states(self) -> list[Tensor]:
        """Every tensor of the optimizer's state."""
        return list(_parts_of(tensors_in([dict(state) for state in self.optimizer.state.values()])))

    @property
    def _is_compiled(self) -> bool:
        """Whether states consist of tensors, as torchao's: a compiled kernel per parameter reads and writes them."""
        return self._largest_low_bit > 0

    @property
    def _largest_low_bit(self) -> int:
        """Elements of the largest state that consists of tensors."""
        states = tensors_in([dict(state) for state in self.optimizer.state.values()])
        return max((state.numel() for state in states if hasattr(state, "__tensor_flatten__")), default=0)

    def step(self, live: LiveStorages | None = None) -> None:
        """Makes one step with the gradients that the parameters have; block by block, as masters are stepped."""
        used: dict[Tensor, tuple[Tensor, Tensor | None]]
        used = {stand_in: (parameter, kept) for parameter, stand_in, kept in self._of if parameter.grad is not None}
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ValueError(
                "estimate_memory() cannot step LBFGS: how often it runs the step depends on the loss. It keeps about"
                " 2 x history_size + 2 values per parameter; pass optimizer='SGD' for everything else of the step."
            )
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        for stand_in in used:
            stand_in.grad = torch.empty_like(stand_in)  # blocks are made of parameters that have one
        blocks = step_blocks(self.optimizer) if self._precision.master_bytes else []
        for stand_in in used:
            stand_in.grad = None
        try:
            for block in blocks or [whole]:
                for group, members in zip(groups, block, strict=True):
                    group["params"] = members
                self._step_block([p for members in block for p in members if p in used], used, live)
        finally:
            for group, members in zip(groups, whole, strict=True):
                group["params"] = members

    def _bytes_to_join(self, members: list[Tensor], used: Mapping[Tensor, tuple[Tensor, Tensor | None]]) -> int:
        """What is there beside copies and rests of compressed masters while a kernel joins them."""
        compressed = [kept for p in members if (kept := used[p][1]) is not None and not kept.is_floating_point()]
        return self._joining_bytes * sum(kept.numel() for kept in compressed)

    def _step_block(
        self, members: list[Tensor], used: Mapping[Tensor, tuple[Tensor, Tensor | None]], live: LiveStorages | None
    ) -> None:
        sees_gradients = live is not None and not evaluates_its_closure_once(type(self.optimizer))
        if live is not None and not sees_gradients:  # of a step that may evaluate the loss, they are there before it
            live.sample(self._bytes_to_join(members, used))
        for stand_in in members:
            parameter, kept = used[stand_in]
            assert parameter.grad is not None
            widened = parameter.grad.dtype != stand_in.dtype
            stand_in.grad = torch.empty(parameter.shape, dtype=stand_in.dtype, device="meta")
            if live is not None:
                live.add("temporaries" if widened else None, [stand_in.grad])
        if live is not None:
            if sees_gradients:
                live.sample(self._bytes_to_join(members, used))
            for stand_in in members:
                kept = used[stand_in][1]
                if kept is None:
                    live.add(None, [stand_in])
                elif not kept.is_floating_point():  # the whole master, put together for the step
                    live.add("temporaries", [stand_in])
        if live is not None:
            live.sample(self._widening_bytes * self._largest_low_bit)
        observed = (
            private_dispatch_api.observe_dispatch(live.after_operation)
            if live is not None and not self._is_fused and not self._is_compiled
            else nullcontext()
        )
        into_training = getattr(self.optimizer, "train", None)
        try:
            if callable(into_training):
                into_training()  # as the LightningModule of a schedule-free optimizer does
            # A compiled step, as in torchao, would compile for the meta device.
            with observed, torch.compiler.set_stance("force_eager"):
                self.optimizer.step()
        except Exception as error:  # whatever an optimizer of another package raises without data
            reason = str(error).partition("\n")[0].rstrip(".")
            raise ValueError(
                f"estimate_memory() cannot step {type(self.optimizer).__name__} on fake tensors ({reason})."
                " Pass optimizer= with one that keeps as many bytes, such as 'AdamW' (8 per parameter) or 'SGD' (0)."
            ) from error
        finally:
            for stand_in in members:
                stand_in.grad = None
        if live is not None:
            live.add(None, [p for p in members if (kept := used[p][1]) is not None and kept.dtype == torch.int16])


def _of_master(value: Tensor, parameter: Tensor, stand_in: Tensor) -> torch.dtype:
    return stand_in.dtype if value.dtype == parameter.dtype else value.dtype


def _parts_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors themselves; of those made of others, such as 8-bit states, the parts."""
    for tensor in tensors:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            yield tensor
        else:
            yield from _parts_of(getattr(tensor, name) for name in flatten()[0])
