"""One training step of a copy of the module, on fake tensors, and what it does to loss and gradients."""

import inspect
import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api, private_trainer_api
from lightning_mp.ground.core.half_dtypes import HALF_DTYPES
from lightning_mp.ground.core.messages import place_of
from lightning_mp.ground.core.precisions import PrecisionSpec
from lightning_mp.ground.core.random_state import random_state_kept
from lightning_mp.ground.modules.names import parameter_names
from lightning_mp.monitors.preflight_checks.found import FoundStep
from lightning_mp.monitors.step_memory.live_storages import MemorySample
from lightning_mp.monitors.step_memory.sharded_units import Sharding
from lightning_mp.monitors.step_memory.simulated_step import DDPGradients, simulate_step
from lightning_mp.monitors.step_memory.stand_in_optimizer import optimizers_in
from lightning_mp.training.lr_schedule.scheduler_facts import FoundScheduler, read_schedulers, schedulers_in
from lightning_mp.training.policy.fails_in_16_bit import RefusedIn16Bit, WatchFor16Bit
from lightning_mp.training.policy.policy import PrecisionPolicy


class StandInTrainer:
    """Answers like a Trainer, with some answers given in advance, and keeps what is set on it to itself."""

    def __init__(self, trainer: "pl.Trainer", answers: Mapping[str, Any]) -> None:
        self.optimizers: list[Optimizer] = []
        own = {
            "lr_scheduler_configs": [],
            "logger": DummyLogger(),
            "loggers": [DummyLogger()],
            "strategy": _StandInStrategy(trainer.strategy),
            "save_checkpoint": _do_nothing,
        }
        vars(self).update(own, _stands_for=trainer)
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stands_for"], name)


class _StandInStrategy:
    """The strategy, without its collectives and its backward."""

    def __init__(self, strategy: object) -> None:
        same: Callable[..., Any] = lambda value=None, *_, **__: value  # noqa: E731
        self.barrier = self.broadcast = self.reduce = self.all_gather = same
        self.backward: Callable[..., None] = lambda loss, *_, **__: loss.backward()
        self._stands_for = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stands_for"], name)


class NotedOptimizer(LightningOptimizer):
    """Lightning's wrapper of an optimizer, whose step runs the closure and notes that it was called."""

    def __init__(self, optimizer: Any) -> None:
        self.noted = SimpleNamespace(has_stepped=False, had_closure=False)
        super().__init__(optimizer)

    @contextmanager
    @override
    def toggle_model(self, sync_grad: bool = True) -> Generator[None, None, None]:
        """Changes nothing."""
        yield

    @override
    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        """Changes nothing."""
        self.noted.has_stepped, self.noted.had_closure = True, closure is not None
        return closure() if closure is not None else None


def attach_stand_in(module: nn.Module, trainer: StandInTrainer) -> None:
    """Gives a copy of a module the stand-in; what it logs, prints and measures is discarded."""
    for part in module.modules():
        if isinstance(part, pl.LightningModule):
            stand_in: Any = trainer
            part.trainer = stand_in
            # Where stand-ins of tensors are; what is made with device=self.device is combined with them.
            private_trainer_api.set_device_property(part, torch.device("cpu"))
            for name in ("log", "log_dict", "print"):
                setattr(part, name, _do_nothing)
            part.all_gather = lambda data, *_, **__: data  # type: ignore[method-assign]
        elif isinstance(part, Metric | MetricCollection):
            # Metrics read numbers, and no loss is made of them.
            result = _no_metrics if isinstance(part, MetricCollection) else _no_metric
            for name, replacement in (("forward", result), ("compute", result), ("update", _do_nothing)):
                setattr(part, name, replacement)


def _do_nothing(*_: Any, **__: Any) -> None:
    return None


def _no_metric(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())


def _no_metrics(*_: Any, **__: Any) -> dict[str, Tensor]:
    return {}


_CONFIGURE = "configure_optimizers"
_WITHOUT_OPTIMIZERS = "What optimizers train, their schedules and memory are not checked either."
_WANTS_NUMBERS = ("DataDependentOutputException", "DynamicOutputShapeException")
# Operations that refuse two floating-point dtypes, and do not as long as tensors are fake.
_OF_ONE_DTYPE = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.index_add", "aten.index_put")


class OperationNotes:
    """Sees every operation, as :func:`lightning_mp.ground.core.private_dispatch_api.observe_dispatch` shows them.

    Where a checkpoint restores the random state for what it runs again, as it should, random operations see states
    that they saw in the forward. Fake tensors draw none, so each random operation moves the generator here.
    """

    def __init__(self) -> None:
        self.in_backward = self.draws_anew = False
        self.count = 0
        self.mixed_dtypes = ""
        self._states: set[int] = set()
        self._casts: dict[int, list[ref[torch.UntypedStorage]]] = {}  # by the id of what was cast
        # The tensors are kept, so that no other one gets their id.
        self._divided: dict[int, tuple[Tensor, float]] = {}

    def after_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes one operation."""
        self.count += 1
        if torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()):
            self._note_draw()
        if not self.in_backward and str(operation) == "aten._to_copy.default" and result.dtype in HALF_DTYPES:
            self._casts.setdefault(id(args[0]), []).append(ref(result.untyped_storage()))
        if not self.mixed_dtypes and str(operation).startswith(_OF_ONE_DTYPE):
            dtypes = {value.dtype for value in args if isinstance(value, Tensor) and value.is_floating_point()}
            if len(dtypes) > 1:
                named = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
                self.mixed_dtypes = f"{str(operation).split('.')[1]} was given {named}."
        divisor = _divisor(str(operation), args)
        if divisor is not None and isinstance(result, Tensor) and result.ndim == 0:
            self._divided[id(result)] = result, divisor

    def divisor_of(self, loss: Tensor) -> float | None:
        """By which number the last operation has divided a loss; None if it did something else."""
        return self._divided[id(loss)][1] if id(loss) in self._divided else None

    def copies_of(self, weight: Tensor) -> int:
        """How many 16-bit copies of a weight are alive; at the end of a forward those that backward needs."""
        return sum(cast() is not None for cast in self._casts.get(id(weight), ()))

    def _note_draw(self) -> None:
        generator = torch.default_generator
        state = generator.initial_seed()
        if self.in_backward:
            self.draws_anew = self.draws_anew or state not in self._states
        else:
            self._states.add(state)
        # A seed is part of the state that a checkpoint restores.
        generator.manual_seed((state + 1) % 2**63)


def _divisor(operation: str, args: tuple[Any, ...]) -> float | None:
    if len(args) < 2 or isinstance(args[1], bool) or not isinstance(args[1], int | float) or not args[1]:
        return None
    if operation.startswith(("aten.div.", "aten.div_.")):
        return float(args[1])
    if operation.startswith(("aten.mul.", "aten.mul_.")):
        inverse = 1 / args[1]
        # 1/3 is no number of the computer; its inverse is close to a whole one.
        return float(round(inverse)) if abs(inverse - round(inverse)) < 1e-9 else None
    return None


class WatchedStep:
    """Runs ``configure_optimizers``, ``training_step`` and its backward on a copy, and notes what they do."""

    def __init__(self, module: "pl.LightningModule", trainer: StandInTrainer, *, is_set_up: bool) -> None:
        self._module, self._trainer, self._is_set_up = module, trainer, is_set_up
        self.copy: Any = None
        self.samples: list[MemorySample] = []
        self.schedulers: tuple[FoundScheduler, ...] = ()
        self.group_sizes: tuple[tuple[int, ...], ...] | None = None
        self.learning_rates: tuple[float, ...] = ()
        self.optimized: frozenset[str] | None = None
        self.failures: list[tuple[str, str]] = []
        self._optimizers: list[NotedOptimizer] = []
        self._notes = OperationNotes()
        self._watch_for_16_bit: WatchFor16Bit | None = None
        self._loss_divisor: float | None = None
        self._has_run = self._runs_own_code = self._in_manual_backward = False
        self._raw_backwards = self._closure_before_step = self._has_clipped = self._ignores_clipping = False
        self._raw_steps: list[str] = []
        self._weight_copies: tuple[tuple[str, int], ...] = ()
        self._copied_bytes = 0

    def run(
        self,
        batch: Any,
        precision: PrecisionSpec,
        policy: PrecisionPolicy | None,
        device_type: str,
        *,
        accumulates: bool = False,
        ddp_gradients: DDPGradients | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        """Runs it once."""
        self._watch_for_16_bit = WatchFor16Bit(device_type, lambda: self.copy)
        with random_state_kept(torch.device("cpu")), ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stack.enter_context(self._watch_for_16_bit)
            # What fake tensors cannot do is in the report; torch logs it as well, with its stack.
            logger = logging.getLogger("torch._subclasses.fake_tensor")
            stack.callback(setattr, logger, "disabled", logger.disabled)
            logger.disabled = True
            try:
                self.samples = simulate_step(
                    self._module,
                    batch,
                    partial(self._step, stack),
                    optimizer=None,
                    precision=precision,
                    policy=policy,
                    device_type=device_type,
                    accumulates=accumulates,
                    ddp_gradients=ddp_gradients,
                    sharding=sharding,
                    prepare=self._prepare,
                )
            except ValueError as error:
                if type(error.__cause__).__name__ in _WANTS_NUMBERS:
                    raise _reads_numbers(error.__cause__ or error) from error
                # A step that makes its backwards itself returns nothing to differentiate.
                if self._module.automatic_optimization or not self._has_run:
                    raise

    @property
    def mixed_dtypes(self) -> str:
        """What an operation was given that refuses two dtypes; "" if none was."""
        return self._notes.mixed_dtypes

    @property
    def refused_in_16_bit(self) -> tuple[str, RefusedIn16Bit] | None:
        """The first operation that torch would refuse, and in which format; None if it refuses none."""
        watch = self._watch_for_16_bit
        return (watch.dtype, watch.refused) if watch is not None and watch.refused is not None else None

    @property
    def found(self) -> FoundStep | None:
        """The record; None if ``training_step`` did not finish."""
        if not self._has_run:
            return None
        return FoundStep(
            loss_divisor=self._loss_divisor,
            raw_backwards=self._raw_backwards,
            raw_steps=tuple(dict.fromkeys(self._raw_steps)),
            closure_before_step=self._closure_before_step,
            ignores_clipping=self._ignores_clipping,
            draws_anew=self._notes.draws_anew,
            weight_copies=self._weight_copies,
            copied_bytes=self._copied_bytes,
        )

    @property
    def has_optimizers(self) -> bool:
        """Whether ``configure_optimizers`` has finished."""
        return all(what != _CONFIGURE for what, _ in self.failures)

    @property
    def with_gradient(self) -> frozenset[str] | None:
        """Names of parameters that got a gradient; None if no backward came to its end."""
        if not self.samples:
            return None
        names = parameter_names(self.copy)
        return frozenset(n for n, p in zip(names, self.copy.parameters(), strict=True) if p.grad is not None)

    # -- before the step -----------------------------------------------------------------------------------------------

    def _prepare(self, copy: nn.Module) -> None:
        assert isinstance(copy, pl.LightningModule)
        self.copy = copy
        attach_stand_in(copy, self._trainer)
        if not self._is_set_up:
            if _is_overridden(copy, "setup"):
                copy.setup(stage="fit")
            if _is_overridden(copy, "configure_model"):
                copy.configure_model()
        configure, own = copy.configure_optimizers, self.copy

        def configure_optimizers() -> Any:
            try:
                configured = configure()
            except Exception as error:
                reason = str(_reads_numbers(error)) if type(error).__name__ in _WANTS_NUMBERS else _first_line(error)
                self.failures.append((_CONFIGURE, f"{reason} {_WITHOUT_OPTIMIZERS}"))
                return []
            self._take(configured)
            self._try_hooks()
            return configured

        own.configure_optimizers = configure_optimizers
        own.manual_backward = self._manual_backward
        own.clip_gradients = lambda *_, **__: setattr(self, "_has_clipped", True)
        for parameter in copy.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def _take(self, configured: Any) -> None:
        """Records optimizers and schedulers as they were created, and passes them to the copy."""
        names = dict(zip(map(id, self.copy.parameters()), parameter_names(self.copy), strict=True))
        made = [one for one in optimizers_in(configured) if isinstance(one, Optimizer)]
        groups = [group for optimizer in made for group in optimizer.param_groups]
        self.optimized = frozenset(names[id(p)] for group in groups for p in group["params"] if id(p) in names)
        self.group_sizes = tuple(tuple(len(group["params"]) for group in one.param_groups) for one in made)
        self.learning_rates = tuple(float(group.get("initial_lr", group.get("lr", 0.0))) for group in groups)
        self.schedulers = read_schedulers(configured)
        for optimizer in made:
            optimizer.register_step_pre_hook(self._note_step)
        self._optimizers = [NotedOptimizer(optimizer) for optimizer in made]
        self._trainer.optimizers = made
        self.copy.optimizers = lambda *_, **__: _one_or_all(self._optimizers)
        schedulers = [scheduler for scheduler, _, _ in schedulers_in(configured)]
        self.copy.lr_schedulers = lambda: _one_or_all(schedulers) if schedulers else None

    def _try_hooks(self) -> None:
        """Calls ``optimizer_step`` and ``configure_gradient_clipping`` where the module has its own."""
        if not self._module.automatic_optimization:
            return
        for name, attempt in (
            ("optimizer_step", self._try_optimizer_step),
            ("configure_gradient_clipping", self._try_clipping),
        ):
            if _is_overridden(self.copy, name):
                try:
                    with self._own_code():
                        attempt()
                except Exception as error:
                    self.failures.append((name, _first_line(error)))

    def _try_optimizer_step(self) -> None:
        for optimizer in self._optimizers:
            calls: list[None] = []
            self.copy.optimizer_step(0, 0, optimizer, lambda calls=calls: calls.append(None))
            if calls and optimizer.noted.has_stepped and not optimizer.noted.had_closure:
                self._closure_before_step = True

    def _try_clipping(self) -> None:
        value = self._trainer.gradient_clip_val
        if not value:
            return
        learning = [parameter for parameter in self.copy.parameters() if parameter.requires_grad]
        for parameter in learning:
            parameter.grad = torch.empty_like(parameter)
        notes = OperationNotes()
        with private_dispatch_api.observe_dispatch(notes.after_operation):
            for optimizer in self._optimizers:
                self.copy.configure_gradient_clipping(optimizer, value, self._trainer.gradient_clip_algorithm)
        for parameter in learning:
            parameter.grad = None
        self._ignores_clipping = not self._has_clipped and not notes.count

    # -- the step ------------------------------------------------------------------------------------------------------

    def _step(self, stack: ExitStack, copy: Any, batch: Any) -> Any:
        stack.enter_context(private_dispatch_api.observe_dispatch(self._notes.after_operation))
        if not self._is_set_up:
            for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
                if _is_overridden(copy, name):
                    batch = getattr(copy, name)(batch, 0)
        with self._own_code():
            output = copy.training_step(*_arguments_of(copy.training_step, batch))
        self._has_run = True
        if not self._module.automatic_optimization:
            return None
        self._count_copies()
        loss = output["loss"] if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            self._loss_divisor = self._notes.divisor_of(loss)
        self._notes.in_backward = True
        return loss

    def _count_copies(self) -> None:
        """Before a backward, which frees them."""
        named = dict(zip(parameter_names(self.copy), self.copy.parameters(), strict=True))
        copies = {name: self._notes.copies_of(weight) for name, weight in named.items()}
        self._weight_copies = tuple((name, number) for name, number in copies.items() if number > 1)
        self._copied_bytes = sum((number - 1) * 2 * named[name].numel() for name, number in self._weight_copies)

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        self._runs_own_code = True
        try:
            yield
        finally:
            self._runs_own_code = False

    def _manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self._weight_copies:
            self._count_copies()
        self._in_manual_backward = self._notes.in_backward = True
        try:
            loss.backward(*args, **kwargs)
        finally:
            self._in_manual_backward = self._notes.in_backward = False

    def _note_gradient(self, _: Tensor) -> None:
        if self._runs_own_code and not self._in_manual_backward:
            self._raw_backwards = True

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._runs_own_code:
            self._raw_steps.append(type(optimizer).__name__)


def _is_overridden(module: "pl.LightningModule", name: str) -> bool:
    return name in vars(module) or getattr(type(module), name) is not getattr(pl.LightningModule, name)


def _arguments_of(training_step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    names = list(inspect.signature(training_step).parameters)
    if "dataloader_iter" in names:
        raise ValueError("training_step takes batches from `dataloader_iter` itself.")
    return (batch, 0, 0)[: len(names)]


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _reads_numbers(error: BaseException) -> ValueError:
    return ValueError(
        f"{place_of(error)} reads values of tensors, for instance by .item(), an `if` on a tensor or indexing with a"
        " mask, and was tried on fake tensors, which have none."
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
