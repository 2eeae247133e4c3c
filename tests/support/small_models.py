"""One :func:`fit` and the modules, data and Trainers that many tests share.

Modules: :class:`Regression` (may overflow, notes its learning rates), :class:`TokenModel` (labels that are left out),
:class:`ShardedTokenModel` (FSDP2), :class:`StepsByHand` (manual optimization, mixed in), and :class:`Trained` (any
parts with any loss; :class:`Parts` with any forward).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

WIDTH = 8
# 2.7 caches casts inside of a step (PR 21616), allows clipping with a fused optimizer in bf16, and knows more devices
LIGHTNING_27 = tuple(map(int, pl.__version__.split(".")[:2])) >= (2, 7)


class UncachedAutocast(MixedPrecision):
    """Lightning's plugin under plain ``torch.autocast`` without its cache, as a reference on every release."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            yield


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


class Regression(pl.LightningModule):
    """A two-layer net; the loss of the micro-batches in ``overflows`` (counted over the run) is infinite."""

    def __init__(
        self,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
        *,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        overflows: Iterable[int] = (),
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.overflows = set(overflows)
        self.seen_batches = 0
        self.learning_rates: list[float] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y.float())
        if self.seen_batches in self.overflows:
            loss = loss * torch.inf
        self.seen_batches += 1
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        # The learning rate that each step which is really made uses.
        optimizer.register_step_pre_hook(
            lambda stepping, *_: self.learning_rates.append(float(stepping.param_groups[0]["lr"]))
        )
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step"},
        }


class Trained(pl.LightningModule):
    """Any parts, made under seed 0 in this order, with a loss and an optimizer: what most tests need of a module.

    Args:
        loss: from this module and a batch.
        optimizer: from the parameters that require gradients; SGD with a learning rate of 0.1.
        parts: submodules or parameters by name, each as a function that makes it.

    Example:
        >>> module = Trained(lambda module, batch: module.net(batch).square().mean(), net=lambda: nn.Linear(4, 4))
        >>> module.net
        Linear(in_features=4, out_features=4, bias=True)
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor | None],
        optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1),  # noqa: B008
        **parts: Callable[[], Any],
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.make_optimizer = loss, optimizer
        for name, make in parts.items():
            setattr(self, name, make())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class Parts(nn.Module):
    """Any parts, and a forward that is given this module first; as :class:`Trained` has any loss."""

    def __init__(self, function: Callable[..., Any], **parts: Callable[[], Any]) -> None:
        super().__init__()
        self.function = function
        for name, make in parts.items():
            setattr(self, name, make())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


class StepsByHand(pl.LightningModule):
    """Mixed in before another module: its steps in manual optimization, one in each batch."""

    automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class TokenModel(pl.LightningModule):
    """An embedding and a head over a small vocabulary; mean cross-entropy that leaves label -100 out."""

    def __init__(
        self, optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd, vocabulary: int = 11
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)
        self.make_optimizer = optimizer
        self.trained_tokens = 0

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.trained_tokens += int((y != -100).sum())
        return nn.functional.cross_entropy(self.head(self.embedding(x)).flatten(0, 1).float(), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


def shard(module: pl.LightningModule, *layers: nn.Module, **options: Any) -> None:
    """FSDP2 for each of these layers that is not sharded yet: what ``configure_model`` does in a run over ranks."""
    for layer in layers:
        if not any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
            fully_shard(layer, mesh=module.device_mesh["data_parallel"], **options)  # type: ignore[index]


class ShardedTokenModel(TokenModel):
    """Under ``ModelParallelStrategy``."""

    def configure_model(self) -> None:
        shard(self, self.head, self.embedding)


def regression_batches(num_batches: int, batch_size: int = 4, width: int = WIDTH) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(num_batches, batch_size, width, generator=generator)
    return [[x, x.square().mean(1, keepdim=True)] for x in xs]


def token_batches(lengths: Sequence[int], batch_size: int = 2, vocabulary: int = 11) -> list[list[Tensor]]:
    """One batch per length: that many target tokens in all, the rest of the rows padded with -100."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for tokens in lengths:
        columns = -(-tokens // batch_size) + 1
        x = torch.randint(vocabulary, (batch_size, columns), generator=generator)
        y = torch.randint(vocabulary, (batch_size, columns), generator=generator)
        hidden = torch.randperm(batch_size * columns, generator=generator)[tokens:]
        y.view(-1)[hidden] = -100
        batches.append([x, y])
    return batches


def loader(batches: list[Any]) -> "DataLoader[Any]":
    """Hands out ready batches in order, as they are: torch's own conversion would turn tuples into lists."""
    return DataLoader(batches, batch_size=None, shuffle=False, collate_fn=lambda batch: batch)


class ResumableLoader:
    """Hands out ready batches in order, epoch after epoch, and goes on where its state says."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.position %= len(self.batches)
        for batch in self.batches[self.position :]:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def quiet_trainer(**arguments: Any) -> pl.Trainer:
    """A CPU Trainer without files and output."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(**(defaults | arguments))


def at(
    action: Callable[[Any, Any], Any],
    hook: str = "on_train_batch_end",
    *,
    step: int | None = None,
    batch_idx: int | None = None,
    call: int | None = None,
    rank: int | None = None,
) -> Callback:
    """A callback that calls ``action(trainer, module)`` in a hook: always, or only where all that is given holds.

    Args:
        action: for example :func:`saving`, :func:`raising` or :func:`stop_run`.
        hook: its name.
        step: optimizer steps so far.
        batch_idx: the last argument of hooks of batches.
        call: the n-th call of the hook, from 1.
        rank: of the process; -1 is the last one.
    """
    calls = itertools.count(1)

    def called(trainer: pl.Trainer, module: pl.LightningModule, *arguments: Any) -> None:
        now = (trainer.global_step, next(calls), trainer.global_rank, *arguments[-1:])
        wanted = (step, call, None if rank is None else rank % trainer.world_size)
        wanted += () if batch_idx is None else (batch_idx,)
        if all(given is None or given == found for given, found in zip(wanted, now, strict=False)):
            action(trainer, module)

    callback = Callback()
    setattr(callback, hook, called)
    return callback


def saving(path: Any) -> Callable[[Any, Any], None]:
    return lambda trainer, _: trainer.save_checkpoint(path)


def raising(error: BaseException) -> Callable[[Any, Any], None]:
    def action(*_: Any) -> None:
        raise error

    return action


def plant_inf(name: str = "") -> Callable[[Any, Any], None]:
    """In what this rank has of the gradient of the parameter, or of the first that has one."""

    def action(_: Any, module: nn.Module) -> None:
        parameter = module.get_parameter(name) if name else next(p for p in module.parameters() if p.grad is not None)
        gradient = parameter.grad
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[-1] = torch.inf

    return action


def stop_run(trainer: pl.Trainer, _: Any) -> None:
    trainer.should_stop = True


class Outcomes(Callback):
    """Keeps the outcome of each optimizer step in ``seen``."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
        self.seen.append(outcome)


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def fit(
    module: pl.LightningModule,
    batches: Any,
    *callbacks: pl.Callback,
    plugin: Any = None,
    validation: Any = None,
    ckpt_path: Any = None,
    save_to: Any = None,
    steps: int | None = None,
    **arguments: Any,
) -> pl.Trainer:
    """A :func:`quiet_trainer` of these parts, after it has trained on ready batches or on a loader.

    Args:
        module: what is trained.
        batches: a sequence of ready batches, or a loader.
        callbacks: of the Trainer, in this order.
        plugin: the only plugin; several are ``plugins=``.
        validation: like ``batches``.
        ckpt_path: the checkpoint that it resumes from.
        save_to: where a checkpoint is saved after the run.
        steps: optimizer steps of the run, resumed ones counted, in as many epochs as they take.
        arguments: of the Trainer.
    """
    if callbacks:
        arguments["callbacks"] = list(callbacks)
    if plugin is not None:
        arguments["plugins"] = [plugin]
    if steps is not None:
        arguments |= {"max_steps": steps, "max_epochs": -1}
    data = [loader(given) if hasattr(given, "__getitem__") else given for given in (batches, validation)]
    trainer = quiet_trainer(**arguments)
    trainer.fit(module, *data, ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return trainer
