"""Random training runs, and a loop in plain PyTorch that says how each of them ends.

Nothing of ``lightning_mp`` is used here: windows, loss scale, checks, clipping, masters and skips are written anew, in
the simplest way that is right.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

WIDTH = 8
SCALE = 2.0**8
GROWTH_INTERVAL = 4
MAX_SCALE = 2.0**11

Precision = Literal[
    "16-mixed", "bf16-mixed", "16-true", "bf16-true", "bf16-true remainder", "bf16-true 24bit", "32 guarded"
]
Hook = Literal["none", "halve", "zero", "inf"]
StepOverride = Literal["none", "closure first", "through"]

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "16-true": torch.float16}
PRECISIONS: tuple[Precision, ...] = (
    "16-mixed",
    "bf16-mixed",
    "16-true",
    "bf16-true",
    "bf16-true remainder",
    "bf16-true 24bit",
    "32 guarded",
)
OPTIMIZERS = (
    "SGD", "momentum", "nesterov", "Adam", "AdamW", "amsgrad", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adamax",
    "Adadelta", "ASGD", "SAM",
)  # fmt: skip
FUSED = ("SGD", "momentum", "Adam", "AdamW", "Adagrad")


@dataclass(frozen=True)
class Case:
    """One run."""

    seed: int
    precision: Precision
    optimizer: str
    fused: bool
    clip: tuple[str, float] | None
    window: int
    epochs: int
    sizes: tuple[int, ...]
    """Samples of each micro-batch of an epoch."""
    bad: frozenset[int]
    """Micro-batches of the run whose loss is not finite."""
    bad_value: float
    hook: Hook
    hook_steps: frozenset[int]
    """Attempts at a step at which ``on_before_optimizer_step`` writes."""
    override: StepOverride
    frozen: bool
    added_group: bool
    """In the second epoch the optimizer gets another layer."""
    legs: tuple[int, ...] = ()
    """Ranks of one leg after the other, each resumed from the one before; empty for one process without a stop."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix products."""
        if self.precision == "32 guarded":
            return torch.float32
        return DTYPES.get(self.precision, torch.bfloat16)

    @property
    def scaled(self) -> bool:
        """Whether there is a loss scale."""
        return self.dtype == torch.float16

    @property
    def masters(self) -> bool:
        """Whether weights are 16 bit, over fp32 masters."""
        return "true" in self.precision

    @property
    def steps(self) -> int:
        """Attempts at a step."""
        return self.epochs * -(-len(self.sizes) // self.window)


def make_case(seed: int, *, resumed: bool = False) -> Case:
    """The run of a seed; resumed ones have equal micro-batches that 1, 2 and 3 ranks can share, and whole windows."""
    choose = random.Random(f"{'resumed' if resumed else 'straight'} {seed}")
    optimizer = choose.choice(OPTIMIZERS)
    while resumed and optimizer in ("SAM", "ASGD"):
        optimizer = choose.choice(OPTIMIZERS)
    sam = optimizer == "SAM"
    window = 1 if sam else choose.choice((1, 1, 2, 3))
    epochs = 1 if resumed else 2
    micro_batches = 12 * window if resumed else choose.randint(5, 9)
    sizes = tuple(6 if resumed else choose.randint(2, 6) for _ in range(micro_batches))
    hook = "none" if sam else choose.choice(("none", "none", "none", "halve", "zero", "inf"))
    precisions = ("bf16-mixed",) if sam else PRECISIONS[:6] if resumed else PRECISIONS
    return Case(
        seed=seed,
        precision=choose.choice(precisions),
        optimizer=optimizer,
        fused=optimizer in FUSED and choose.random() < 0.5,
        clip=choose.choice((None, None, ("norm", 0.3), ("norm", 0.02), ("value", 0.02))),
        window=window,
        epochs=epochs,
        sizes=sizes,
        bad=frozenset(choose.sample(range(epochs * micro_batches), choose.choice((0, 1, 2, 3)))),
        bad_value=choose.choice((float("inf"), float("-inf"), float("nan"))),
        hook=hook,
        hook_steps=frozenset(choose.sample(range(8), 3)) if hook != "none" else frozenset(),
        override="none" if sam else choose.choice(("none", "none", "closure first", "through")),
        frozen=choose.random() < 0.4,
        added_group=not resumed and not sam and choose.random() < 0.25,
        legs=tuple(choose.sample((1, 2, 3), choose.choice((2, 3)))) if resumed else (),
    )


class Net(nn.Module):
    """Four layers; one may be frozen, and one may join the optimizer late."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(case.seed)
        self.first, self.middle, self.late = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        self.middle.requires_grad_(not case.frozen)
        self.late.requires_grad_(not case.added_group)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = hidden + torch.tanh(self.middle(hidden))
        output: Tensor = self.head(hidden + torch.tanh(self.late(hidden)))
        return output


def batches_of(case: Case) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of an epoch; targets are far off, so that gradients do not vanish."""
    generator = torch.Generator().manual_seed(1000 + case.seed)
    xs = [torch.randn(size, WIDTH, generator=generator) for size in case.sizes]
    return [(x, x.sum(1, keepdim=True).sign() + 0.5) for x in xs]


class SharpnessAware(torch.optim.Optimizer):
    """SGD with the gradient at the worst place nearby (Foret et al., 2021); it evaluates the closure twice."""

    def __init__(self, params: Any, lr: float = 0.05, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]  # no default: it cannot do without
        with torch.enable_grad():
            loss = closure()
        moved = []
        with torch.no_grad():
            for group in self.param_groups:
                with_gradient = [p for p in group["params"] if p.grad is not None]
                norm = torch.stack([p.grad.norm() for p in with_gradient]).norm()
                for p in with_gradient:
                    away = p.grad * (group["rho"] / (norm + 1e-12))
                    p.add_(away)
                    moved.append((p, away, group["lr"]))
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, away, lr in moved:
                p.sub_(away)
                p.sub_(p.grad, alpha=lr)
        return loss


def make_optimizer(case: Case, parameters: Sequence[nn.Parameter], *, fused: bool) -> torch.optim.Optimizer:
    """The optimizer of a case, as its name says."""
    more: dict[str, Any] = {"fused": True} if fused else {}
    adam: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, **more}  # eps: rounding is not to become a step of another sign
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "SGD": lambda: torch.optim.SGD(parameters, lr=0.05, weight_decay=0.01, **more),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, dampening=0.1, **more),
        "nesterov": lambda: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
        "Adam": lambda: torch.optim.Adam(parameters, **adam),
        "AdamW": lambda: torch.optim.AdamW(parameters, weight_decay=0.1, **adam),
        "amsgrad": lambda: torch.optim.Adam(parameters, amsgrad=True, **adam),
        "NAdam": lambda: torch.optim.NAdam(parameters, **adam),
        "RAdam": lambda: torch.optim.RAdam(parameters, **adam),
        "RMSprop": lambda: torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.5, eps=0.05),
        "Adagrad": lambda: torch.optim.Adagrad(parameters, **adam),
        "Adamax": lambda: torch.optim.Adamax(parameters, **adam),
        "Adadelta": lambda: torch.optim.Adadelta(parameters, lr=1.0, eps=1e-3),
        "ASGD": lambda: torch.optim.ASGD(parameters, lr=0.02, t0=3),
        "SAM": lambda: SharpnessAware(parameters),
    }
    return made[case.optimizer]()


@dataclass
class Result:
    """What a run comes to."""

    stepped: list[bool]
    scales: list[float]
    """Of each attempt at a step."""
    weights: list[Tensor]
    """In full precision, in order of registration."""


class _Loop:
    """Plain PyTorch in fp32 weights; 16-bit weights, if the case has them, are rounded from those."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.net = Net(case)
        self.working = Net(case)
        self.parameters = list(self.net.parameters())
        trainable = [p for p in self.parameters if p.requires_grad]
        self.optimizer = make_optimizer(case, trainable, fused=False)
        self.scale, self.since_overflow = (SCALE if case.scaled else 1.0), 0
        self.result = Result([], [], [])

    def gradients(self, window: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Leaves the mean over the samples of a window in ``.grad``, in fp32 and without scale."""
        sums: list[Tensor | None] = [None] * len(self.parameters)
        for number, x, y in window:
            for place, found in enumerate(self._one_micro_batch(number, x, y)):
                if found is not None:
                    share = found.float() / self.scale * len(x)
                    before = sums[place]
                    sums[place] = share if before is None else before + share
        samples = sum(len(x) for _, x, _ in window)
        for parameter, total in zip(self.parameters, sums, strict=True):
            parameter.grad = None if total is None else total / samples

    def _one_micro_batch(self, number: int, x: Tensor, y: Tensor) -> list[Tensor | None]:
        case, net = self.case, self.net
        if case.masters:
            net = self.working.to(case.dtype)
            x, y = x.to(case.dtype), y.to(case.dtype)
            for parameter, master in zip(net.parameters(), self.parameters, strict=True):
                parameter.data.copy_(master.data)
                parameter.requires_grad_(master.requires_grad)
        autocast = torch.autocast("cpu", case.dtype) if "mixed" in case.precision else nullcontext()
        with autocast:
            output = net(x)
        loss = nn.functional.mse_loss(output.float(), y.float()) * (case.bad_value if number in case.bad else 1.0)
        trainable = [p for p in net.parameters() if p.requires_grad]
        found = dict(zip(trainable, torch.autograd.grad(loss * self.scale, trainable), strict=True))
        return [found.get(p) for p in net.parameters()]

    def hook_writes(self, step: int) -> None:
        if step in self.case.hook_steps:
            write(self.case.hook, [p for p in self.parameters if p.grad is not None])

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(p.grad).all()) for p in self.parameters if p.grad is not None)

    def clip(self) -> None:
        if self.case.clip is None:
            return
        kind, bound = self.case.clip
        if kind == "norm":
            torch.nn.utils.clip_grad_norm_(self.parameters, bound)
        else:
            torch.nn.utils.clip_grad_value_(self.parameters, bound)

    def attempt(self, step: int, window: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        def closure() -> None:
            self.gradients(window)
            self.clip()

        self.gradients(window)
        finite = self.is_finite()
        self.hook_writes(step)
        finite = finite and self.is_finite()  # whoever writes can break gradients, and cannot heal them
        self.result.scales.append(self.scale)
        self.result.stepped.append(finite)
        if finite and self.case.optimizer == "SAM":
            self.optimizer.step(closure)
        elif finite:
            self.clip()
            self.optimizer.step()
        if self.case.scaled:
            self._update_scale(finite)

    def _update_scale(self, finite: bool) -> None:
        self.since_overflow = self.since_overflow + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.since_overflow == GROWTH_INTERVAL:
            self.scale, self.since_overflow = min(self.scale * 2, MAX_SCALE), 0


def write(hook: Hook, parameters: Sequence[nn.Parameter]) -> None:
    """What ``on_before_optimizer_step`` does to the gradients."""
    for parameter in parameters:
        assert parameter.grad is not None
        if hook == "halve":
            parameter.grad.mul_(0.5)
        elif hook == "zero":
            parameter.grad.zero_()
        elif hook == "inf":
            parameter.grad.view(-1)[0] = float("inf")


def reference(case: Case) -> Result:
    """Trains in plain PyTorch, in one process, without a stop."""
    loop = _Loop(case)
    step = 0
    for epoch in range(case.epochs):
        if epoch == 1 and case.added_group:
            loop.net.late.requires_grad_(True)
            loop.optimizer.add_param_group({"params": list(loop.net.late.parameters())})
        numbered = [(epoch * len(case.sizes) + i, x, y) for i, (x, y) in enumerate(batches_of(case))]
        for first in range(0, len(numbered), case.window):
            loop.attempt(step, numbered[first : first + case.window])
            step += 1
    loop.result.weights = [p.detach().clone() for p in loop.parameters]
    return loop.result
