"""Small models of all kinds for estimates of memory, and what a real run of one of them keeps alive."""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from small_models import fit, loader, quiet_trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_mp import JointOptimizer, MasterWeightsPrecision
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.training.gradients.gradient_ops import local_shard
from lightning_mp.training.policy.weights_in_float32 import kept_in_float32, with_exact_parametrizations
from lightning_mp.training.precision.masters.split_parameters import SPLIT_CLASSES

_STEP = "the step that is measured"
_THREAD_SECONDS = 0.01


class MarkStep(pl.Callback):
    """Marks the beginning of one optimizer step, counted from 0, in the trace."""

    def __init__(self, step: int, window: int = 1) -> None:
        self.first_batch = step * window

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first_batch:
            mark_step()


def mark_step() -> None:
    """From here on the peak counts."""
    with torch.profiler.record_function(_STEP):
        pass


def peak_of_step(run: Callable[[], object]) -> int:
    """Bytes at the peak after :func:`mark_step`, of everything that ``run`` allocates, from the model on."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _freed_by_this_thread(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    begin = next(event["ts"] for event in events if event.get("name") == _STEP)
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    return _peak(((event["ts"], event["args"]["Bytes"], event["args"]["Addr"]) for event in memory), begin)


@contextmanager
def _freed_by_this_thread() -> Iterator[None]:
    """The profiler sees nothing of gloo's threads, so what they were the last to hold would never be freed.

    A collective operation therefore outlives the thread that has carried it out.
    """
    wait = torch.distributed.Work.wait

    def wait_for_its_thread(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        time.sleep(_THREAD_SECONDS)
        return result

    torch.distributed.Work.wait = wait_for_its_thread  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.distributed.Work.wait = wait  # type: ignore[method-assign]


def _peak(events: Iterable[tuple[float, int, int]], begin: float) -> int:
    live: dict[int, int] = {}
    now = most = 0
    for when, size, address in events:
        if size > 0:
            now += size - live.get(address, 0)  # the profiler loses events: this block was freed
            live[address] = size
        elif address in live:  # what was there before the trace does not count
            now -= live.pop(address)
        if when >= begin:
            most = max(most, now)
    return most


WIDTH, TOKENS, VOCABULARY = 64, 32, 96


def _head() -> nn.Sequential:
    """Three layers, of which fp8 takes the middle one at least."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10))


class Block(nn.Module):
    """A block of a decoder with grouped queries."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            result: Tensor = checkpoint(self.run, x, use_reentrant=False)
            return result
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        y = self.norm(x)
        q = self.q(y).view(rows, tokens, 4, 16).transpose(1, 2)
        k, v = self.kv(y).view(rows, tokens, 2, 2, 16).permute(2, 0, 3, 1, 4).repeat_interleave(2, dim=2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, *, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(again=again) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)


class Convolutions(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            norm(32),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, WIDTH, 3, stride=2),
            norm(WIDTH),
        )
        self.head = _head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)).mean((2, 3)))


class Decoding(nn.Module):
    """Transposed convolutions behind a linear code."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Sequential(nn.Flatten(), nn.Linear(192, WIDTH), nn.ReLU(), _head()[:4])
        self.image = nn.ConvTranspose2d(WIDTH, 16, 8)
        self.out = nn.Sequential(nn.Flatten(), nn.Linear(1024, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.image(self.code(x)[..., None, None])))


class Adapted(nn.Module):
    """A frozen base under low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]).requires_grad_(False)
        self.low = nn.ModuleList([nn.Linear(WIDTH, 4, bias=False) for _ in range(4)])
        self.high = nn.ModuleList([nn.Linear(4, WIDTH, bias=False) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for base, low, high in zip(self.base, self.low, self.high, strict=True):
            x = F.gelu(base(x) + high(low(x)))
        return self.head(x)


class Experts(nn.Module):
    """Each token weighs all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([_head()[:3] for _ in range(4)])
        self.head = _head()

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        return self.head(sum(share[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = _head()

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.head(torch.tanh(self.left(x["left"]) * self.right(x["right"])))


class Recurrent(nn.Module):
    """A cell that is used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = _head()

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for token in x.unbind(1)[:6]:
            state = torch.tanh(self.inner(token) + self.outer(state))
        return self.head(state)


class Recurrence(nn.Module):
    """torch's own recurrent layers between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.GRU(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), *_head())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(self.table(x))[0])
        return result


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x)
        result: Tensor = self.head(self.body(y, y)).flatten(0, 1)
        return result


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner, self.middle = self._layer(3, 32), self._layer(32, WIDTH), self._layer(WIDTH, WIDTH)
        self.up, self.merged = nn.ConvTranspose2d(WIDTH, 32, 2, stride=2), self._layer(64, 32)
        self.out = nn.Conv2d(32, 3, 1)

    @staticmethod
    def _layer(channels: int, width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        outer = self.outer(x)
        inner = self.up(self.middle(self.inner(F.max_pool2d(outer, 2))))
        return self.out(self.merged(torch.cat([inner, outer], 1)))


class Frozen(nn.Module):
    """A frozen body of convolutions under a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Convolutions(nn.BatchNorm2d).body.requires_grad_(False)
        self.head = _head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)).mean((2, 3)))


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _rows(count: int = 256) -> Tensor:
    return _floats(count, WIDTH)


_IMAGES, _IDS = (32, 3, 8, 8), torch.arange(4 * TOKENS).view(4, TOKENS) % VOCABULARY
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), _head()), _rows),
    "norms and dropout": (
        lambda: nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.RMSNorm(WIDTH), _head()
        ),
        _rows,
    ),
    "batch norm": (lambda: Convolutions(nn.BatchNorm2d), lambda: _floats(*_IMAGES)),
    "group norm": (lambda: Convolutions(lambda width: nn.GroupNorm(4, width)), lambda: _floats(*_IMAGES)),
    "transposed": (Decoding, lambda: _floats(*_IMAGES)),
    "decoder": (Decoder, lambda: _IDS),
    "tied decoder": (lambda: Decoder(tied=True), lambda: _IDS),
    "checkpointed decoder": (lambda: Decoder(again=True), lambda: _IDS),
    "adapters": (Adapted, _rows),
    "experts": (Experts, _rows),
    "two inputs": (TwoInputs, lambda: {"left": _rows(), "right": _rows()}),
    "recurrent": (Recurrent, lambda: _floats(8, TOKENS, WIDTH)),
    "gru": (Recurrence, lambda: _IDS),
    "encoder-decoder": (EncoderDecoder, lambda: _IDS),
    "u-net": (UNet, lambda: _floats(16, 3, 16, 16)),
    "frozen": (Frozen, lambda: _floats(*_IMAGES)),
    "three channels out": (
        lambda: nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)),
        lambda: _floats(8, 16, 32, 32),
    ),
}


def _muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    both = list(parameters)
    matrices, rest = [p for p in both if p.ndim == 2], [p for p in both if p.ndim != 2]
    if not (matrices and rest):
        return torch.optim.Muon(matrices, lr=1e-4) if matrices else torch.optim.AdamW(rest, lr=1e-4, fused=True)
    return JointOptimizer([torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(rest, lr=1e-4, fused=True)])


def _schedule_free(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    optimizer: torch.optim.Optimizer = AdamWScheduleFree(parameters, lr=1e-4)
    return optimizer


def _eight_bit(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(parameters, lr=1e-4)
    return optimizer


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4),
    "foreach AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-4),  # its constructor makes the states
    "Muon": _muon,
    "schedule-free": _schedule_free,
    "8-bit": _eight_bit,
}


class Project(pl.LightningModule):
    """The user's module around one of the models."""

    def __init__(self, name: str, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = MODELS[name][0]()
        self.make_optimizer = OPTIMIZERS[optimizer]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("seen", 1.0)
        loss = self.net(batch).float().square().mean()
        self.after_forward()
        return loss

    def after_forward(self) -> None:
        """Replaced by those that measure here: a hook before the gradients are cleared would keep the last step's."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])

    def on_train_start(self) -> None:
        for optimizer in self.trainer.optimizers:
            if hasattr(optimizer, "train"):
                optimizer.train()


class Measured(pl.Callback):
    """What is alive at the end of the forward in the second step of a real run, found by walking the tensors.

    Attributes:
        parts: bytes by part.
        peak_bytes: the most that torch's allocator held during the step.
        gradient_bytes: of the step before, when the second one begins.
    """

    def __init__(self) -> None:
        self.parts: dict[str, int] = {}
        self.peak_bytes = 0
        self.gradient_bytes = 0
        self._saved: dict[StorageWeakRef, int] = {}
        self._hooks: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        self.gradient_bytes = _bytes(self._held(trainer, pl_module, batch)["gradients"])
        self._batch = batch
        self._hooks = saved_tensors_hooks(self._save, lambda tensor: tensor)
        self._hooks.__enter__()
        pl_module.after_forward = partial(self._after_forward, trainer, pl_module)

    def _after_forward(self, trainer: Any, pl_module: Any) -> None:
        del pl_module.after_forward
        self._hooks.__exit__(None, None, None)
        held = self._held(trainer, pl_module, self._batch)
        known = {StorageWeakRef(t.untyped_storage()) for tensors in held.values() for t in tensors}
        self.parts = {part: _bytes(tensors) for part, tensors in held.items()}
        alive = {key: size for key, size in self._saved.items() if not key.expired() and key not in known}
        self.parts["saved"] = sum(alive.values())

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._saved.setdefault(StorageWeakRef(storage), storage.nbytes())
        return tensor.detach()

    @staticmethod
    def _held(trainer: Any, module: nn.Module, batch: Any) -> dict[str, list[Tensor]]:
        lent = getattr(trainer.precision_plugin, "_lent", None)
        copies = {id(loan.parameter): loan.copy for loan in lent.loans} if lent is not None else {}
        compressed = getattr(trainer.precision_plugin, "_compressed", None)
        memories = [loan.memory for loan in compressed.loans] if compressed is not None else []
        split = {id(p) for p in module.parameters() if type(p) in SPLIT_CLASSES}
        gathered = _gathered_masters(trainer.precision_plugin, module) if lent is None else set()
        states = [dict(state) for one in trainer.optimizers for state in one.state.values()]
        return {
            "weights": [copies.get(id(p), p).detach() for p in module.parameters() if id(p) not in split | gathered]
            + [memory.split.high for memory in memories],
            "buffers": list(module.buffers()),
            "gradients": [p.grad for p in module.parameters() if p.grad is not None],
            "masters": [
                p.detach() for p in module.parameters() if id(p) in copies.keys() | gathered and id(p) not in split
            ]
            + [memory.split.rest for memory in memories],
            "optimizer states": list(tensors_in(states)),
            "batch": list(tensors_in(batch)),
        }


def _gathered_masters(plugin: Any, module: nn.Module) -> set[int]:
    """The fp32 shards of which FSDP2 gathers 16-bit copies, by their ids."""
    if not isinstance(plugin, MasterWeightsPrecision):
        return set()
    kept = kept_in_float32(module, with_exact_parametrizations(plugin.policy, module), plugin.dtype)
    in_float32 = {id(p) for part in kept for p in part.parameters(recurse=False)}
    return {id(p) for p in module.parameters() if p.requires_grad and id(p) not in in_float32}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({StorageWeakRef(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())


def measure(name: str, optimizer: str, plugin: Any) -> Measured:
    """A real run of two steps on the CPU."""
    measured = Measured()
    plugins = [] if plugin is None else [plugin]

    def run() -> None:
        batches = [MODELS[name][1]()] * 2
        fit(Project(name, optimizer), batches, MarkStep(1), measured, max_steps=2, plugins=plugins)

    measured.peak_bytes = peak_of_step(run)
    return measured


def measure_peak(
    name: str, optimizer: str, plugin: Any, strategy: Any = "auto", *, window: int = 1, ranks: int = 1
) -> int:
    """The most that the allocator of this rank held in the third optimizer step of a real run."""
    plugins = [] if plugin is None else [plugin]

    def run() -> None:
        trainer = quiet_trainer(
            max_steps=3,
            devices=ranks,
            strategy=strategy,
            plugins=plugins,
            callbacks=[MarkStep(2, window)],
            accumulate_grad_batches=window,
        )
        trainer.fit(Project(name, optimizer), loader([MODELS[name][1]()] * 3 * window))

    return peak_of_step(run)


class MeasuredOnRank(pl.Callback):
    """What one rank of several holds when a step begins, and what its forward saves; gathered weights are left out."""

    def __init__(self) -> None:
        self.parts: dict[str, int] = {}
        self._saved: dict[StorageWeakRef, int] = {}
        self._weights: set[StorageWeakRef] = set()
        self._buckets: dict[int, int] = {}
        self._hooks: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.model, DistributedDataParallel):
            trainer.model.register_comm_hook(None, self._count_bucket)

    def _count_bucket(self, state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        self._buckets[bucket.index()] = bucket.buffer().nbytes
        return allreduce_hook(None, bucket)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.parts["buckets"] = sum(self._buckets.values())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        # Now weights are sharded. Gradients of the step before are freed when the forward begins.
        held = Measured._held(trainer, pl_module, []) | {"gradients": []}
        self.parts = {part: _bytes(map(local_shard, tensors)) for part, tensors in held.items()}
        self._handle = register_module_forward_hook(self._note_weights)
        self._weights |= {StorageWeakRef(t.untyped_storage()) for t in tensors_in(batch)}
        self._hooks = saved_tensors_hooks(self._save, lambda tensor: tensor)
        self._hooks.__enter__()
        pl_module.after_forward = partial(self._after_forward, pl_module)

    def _after_forward(self, pl_module: Any) -> None:
        del pl_module.after_forward
        self._hooks.__exit__(None, None, None)
        self._handle.remove()
        alive = {key: size for key, size in self._saved.items() if not key.expired() and key not in self._weights}
        self.parts["saved"] = sum(alive.values())

    def _note_weights(self, module: nn.Module, args: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self._weights.add(StorageWeakRef(local_shard(parameter.detach()).untyped_storage()))

    def _save(self, tensor: Tensor) -> Tensor:
        storage = local_shard(tensor.detach()).untyped_storage()
        self._saved.setdefault(StorageWeakRef(storage), storage.nbytes())
        return tensor.detach()


def measure_on_rank(name: str, plugin: Any, strategy: Any, optimizer: str = "AdamW") -> dict[str, int]:
    """Bytes by part on this rank, of two in a run on the CPU."""
    measured = MeasuredOnRank()
    trainer = quiet_trainer(max_steps=2, devices=2, strategy=strategy, plugins=[plugin], callbacks=[measured])
    trainer.fit(Project(name, optimizer), loader([MODELS[name][1]() for _ in range(2)]))
    return measured.parts
