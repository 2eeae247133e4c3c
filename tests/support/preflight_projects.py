"""Projects with one thing wrong about each, as a user would write them; ``PROJECTS`` has them by name."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from cpu_fsdp import CpuFsdp
from lightning.pytorch.plugins import MixedPrecision
from small_models import WIDTH, fit, loader, quiet_trainer, regression_batches, token_batches
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    Float8Precision,
    MasterWeightsPrecision,
    MFUMonitor,
)
from lightning_mp.monitors.preflight_checks.report import FindingName, Severity

BATCHES = 12


class Net(pl.LightningModule):
    """Nothing is wrong with it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ScattersIntoBf16(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[0](batch[0])
        target = torch.zeros(hidden.shape, device=hidden.device)
        target = target.index_add(0, torch.arange(len(hidden), device=hidden.device), hidden)
        return target.square().mean() + super().training_step(batch, batch_idx)


class DividesByTrainer(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.trainer.accumulate_grad_batches


class DividesByConstant(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx) * (1 / 3)}


class StepsTheBareOptimizer(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.optimizer.step(optimizer_closure)


class StepsAfterTheClosure(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.own_backward(super().training_step(batch, batch_idx))
        self.own_step(optimizer)

    def own_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def own_step(self, optimizer: Any) -> None:
        optimizer.step()


class RawBackward(Manual):
    def own_backward(self, loss: Tensor) -> None:
        loss.backward()


class RawStep(Manual):
    def own_step(self, optimizer: Any) -> None:
        optimizer.optimizer.step()


class ForgetsToClip(Net):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        pass


class OtherMasks(Net):
    """Recomputes dropout with other random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.Dropout(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = checkpoint(self.net, batch[0], use_reentrant=False, preserve_rng_state=False)
        return F.mse_loss(out, batch[1])


class TrainsAnother(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(Net().parameters())


class ForgottenHead(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net[0].parameters(), lr=1e-3)


class DropPath(nn.Identity):
    """As that of timm and transformers."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob


class Scheduled(Net):
    """What ``make`` makes, as Lightning takes it."""

    def __init__(self, make: Callable[[Any, "Scheduled"], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": self.make(optimizer, self)}


class Tokens(Net):
    """An embedding and a head, of which the embedding is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 11))
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1).float(), batch[1].flatten())


class Unrolled(Net):
    """Its first layer is used 16 times; the first time nothing needs its weight in backward."""

    def __init__(self) -> None:
        super().__init__(512)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for _ in range(16):
            x = torch.tanh(self.net[0](x))
        return F.mse_loss(self.net[2](x).float(), batch[1])


class ManualUnrolled(Unrolled):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def changed(change: Callable[[Any], Any]) -> Callable[[], Net]:
    """A :class:`Net` of which something is changed."""

    def make() -> Net:
        module = Net()
        change(module)
        return module

    return make


own_scaler = changed(lambda module: setattr(module, "scaler", torch.amp.GradScaler("cpu")))


def _frozen_base() -> nn.Module:
    """4.3 MiB in fp32."""
    return nn.Sequential(nn.Linear(WIDTH, 2**16), nn.Linear(2**16, WIDTH)).requires_grad_(False)


def _share_memory(module: Net) -> None:
    """Two parameters with one memory."""
    module.net.append(nn.Linear(1, 1))
    module.net.insert(1, nn.Linear(WIDTH, WIDTH))
    module.net[1].weight = nn.Parameter(module.net[0].weight.data)


def _huge() -> Net:
    """6 billion parameters, without memory."""
    with torch.device("meta"):
        return Net(80_000)


def _one_cycle(optimizer: Any, module: pl.LightningModule, steps: int | None = None) -> dict[str, Any]:
    total = module.trainer.estimated_stepping_batches if steps is None else steps
    return {"scheduler": lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=int(total)), "interval": "step"}


def _cosine_after_warmup(optimizer: Any, module: pl.LightningModule) -> dict[str, Any]:
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 4 * BATCHES)]
    return {"scheduler": lr_scheduler.SequentialLR(optimizer, parts, milestones=[5]), "interval": "step"}


def _cosine_of_a_lambda(optimizer: Any, module: pl.LightningModule) -> dict[str, Any]:
    total = module.trainer.estimated_stepping_batches

    def factor(step: int) -> float:
        return step / 10 if step < 10 else 0.5 * (1 + math.cos(math.pi * min(1, step / total)))

    return {"scheduler": lr_scheduler.LambdaLR(optimizer, factor), "interval": "step"}


@dataclass(frozen=True)
class Project:
    """What a user has.

    Attributes:
        name: of the finding that it gives.
        severity: of it.
        what: a part of what is said.
        cure: a part of the cure.
        module: the LightningModule.
        trainer: arguments of the Trainer.
        options: of ``preflight``.
        batches: of an epoch.
        also: names of findings that follow from the same fault.
    """

    name: FindingName
    severity: Severity
    what: str
    cure: str
    module: Callable[[], pl.LightningModule] = Net
    trainer: Callable[[], dict[str, Any]] = dict
    options: dict[str, Any] = field(default_factory=dict)
    batches: Callable[[], list[Any]] = lambda: regression_batches(BATCHES)
    also: tuple[FindingName, ...] = ()

    def make(self) -> tuple[pl.Trainer, pl.LightningModule, Any]:
        """Trainer, module and data."""
        return quiet_trainer(**self.trainer()), self.module(), loader(self.batches())


def _fp16(**trainer: Any) -> dict[str, Any]:
    return {"plugins": [AutocastPrecision("16-mixed")], **trainer}


def _stock_fp16(scaler: Any = None) -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler or torch.amp.GradScaler("cpu"))]}


def _fsdp() -> dict[str, Any]:
    own = FSDPMixedPrecision(param_dtype=torch.bfloat16)
    return {"plugins": [AutocastPrecision("bf16-mixed")], "strategy": CpuFsdp(mixed_precision=own)}


def _of_checkpoint(name: str, severity: Severity, what: str, cure: str, **trainer: Any) -> Project:
    path = Path(f"{name}.ckpt")
    return Project(
        "checkpoint", severity, what, cure, trainer=lambda: trainer or {"max_epochs": 2}, options={"ckpt_path": path}
    )


PROJECTS: dict[str, Project] = {
    "bf16 for a T4": Project(
        *("device", "warning", "T4 (Turing) has no bf16 units", "AutocastPrecision('16-mixed')"),
        trainer=lambda: {"plugins": [AutocastPrecision("bf16-mixed")]},
        options={"device": "T4"},
    ),
    "fp8 for an A100": Project(
        *("device", "error", "A100 (Ampere) has no fp8 units", "AutocastPrecision('bf16-mixed')"),
        trainer=lambda: {"plugins": [Float8Precision()]},
        options={"device": "A100"},
        also=("fp8",),
    ),
    "fp8 for small layers": Project(
        *("fp8", "error", "multiply nothing in fp8: 0 of 2 Linear layers", "AutocastPrecision('bf16-mixed')"),
        trainer=lambda: {"plugins": [Float8Precision(emulate=True)]},
        options={"device": "H100"},
    ),
    "fp8 without torch.compile": Project(
        *("fp8", "advice", "0.18x of bf16's tokens per second", "block.compile()"),
        lambda: Net(1600),
        trainer=lambda: {"plugins": [Float8Precision(emulate=True, skip_first_and_last=False)]},
        options={"device": "H100"},
        batches=lambda: regression_batches(BATCHES, width=1600),
    ),
    "a scaler that is switched off": Project(
        *("scaler_missing", "error", "fp16 without a loss scale", "AutocastPrecision('16-mixed')"),
        trainer=partial(_stock_fp16, torch.amp.GradScaler("cpu", enabled=False)),
    ),
    "fp16 weights": Project(
        *("scaler_missing", "error", "HalfPrecision('16-true')", "MasterWeightsPrecision('16-true')"),
        trainer=lambda: {"precision": "16-true"},
        also=("weights_in_16_bit",),
    ),
    "anomalies under a loss scale": Project(
        *("detect_anomaly", "error", "at its first overflow", "OverflowPostMortem(replay=True)"),
        trainer=lambda: _fp16(detect_anomaly=True),
    ),
    "two scalers": Project(
        *("scaler_superfluous", "error", "so does a GradScaler in the module (scaler)", "scaler=LossScaler(...)"),
        own_scaler,
        _fp16,
    ),
    "a scaler for bf16": Project(
        *("scaler_superfluous", "warning", "bf16 has the range of fp32", "Remove the scaler"),
        own_scaler,
        lambda: {"precision": "bf16-mixed"},
    ),
    "a monitor that finds no tokens": Project(
        *("refused", "error", "MFUMonitor cannot count tokens in a batch of type 'list'", "Pass count="),
        trainer=lambda: {"callbacks": [MFUMonitor()]},
    ),
    "a monitor beside manual optimization": Project(
        *("refused", "error", "MFUMonitor needs automatic optimization", "Remove the callback"),
        Manual,
        lambda: {"callbacks": [MFUMonitor(unit="sample")]},
    ),
    "fp32 beside autocast": Project(
        *("dtypes", "error", "AutocastPrecision('bf16-mixed')", "Cast one side where they come together"),
        ScattersIntoBf16,
        lambda: {"plugins": [AutocastPrecision("bf16-mixed")]},
    ),
    "precision at plugin and strategy": Project(
        *("two_precisions", "warning", "Fsdp(mixed_precision=...)", "Leave the strategy's setting out"), trainer=_fsdp
    ),
    "bf16 weights": Project(
        *("weights_in_16_bit", "warning", "HalfPrecision('bf16-true')", "MasterWeightsPrecision('bf16-true')"),
        trainer=lambda: {"precision": "bf16-true"},
    ),
    "a model loaded in bf16": Project(
        *("weights_in_16_bit", "warning", "4 of 4 trainable parameters are bfloat16", "module.float()"),
        lambda: Net().bfloat16(),
        lambda: {"precision": "bf16-mixed"},
    ),
    "an adapter in bf16": Project(
        *("weights_in_16_bit", "warning", "2 of 2 trainable parameters are bfloat16", "Cast the trainable ones alone"),
        changed(lambda module: (module.net[0].requires_grad_(False), module.bfloat16())),
        lambda: {"precision": "bf16-mixed"},
    ),
    "a model loaded in fp16": Project(
        *("weights_in_16_bit", "error", "4 of 4 trainable parameters are float16", "MasterWeightsPrecision('16-true')"),
        lambda: Net().half(),
        _fp16,
    ),
    **{
        f"a frozen base in fp32 under {type(plugin()).__name__}": Project(
            *("frozen_in_fp32", "advice", "4 frozen parameters are fp32 (", "dtype=torch.bfloat16"),
            changed(lambda module: module.net.insert(0, _frozen_base())),
            lambda plugin=plugin: {"plugins": [plugin()]},  # type: ignore[misc]
        )
        for plugin in (partial(AutocastPrecision, "bf16-mixed"), partial(MasterWeightsPrecision, "bf16-true"))
    },
    "odd sizes": Project(
        *("tensor_cores", "advice", "in_features of net.0, net.2 is 100, not a multiple of 8", "Make it 104"),
        lambda: Net(100),
        lambda: {"precision": "bf16-mixed"},
        {"device": "H100"},
        batches=lambda: regression_batches(BATCHES, width=100),
        also=("tensor_cores",),
    ),
    "a loss divided by the Trainer's window": Project(
        *("loss_divided_twice", "error", "trainer.accumulate_grad_batches (4)", "Return the loss as it is"),
        DividesByTrainer,
        lambda: {"accumulate_grad_batches": 4},
    ),
    "a loss divided by a constant": Project(
        *("loss_divided_twice", "warning", "division by 3", "return the loss as it is"),
        DividesByConstant,
        lambda: {"accumulate_grad_batches": 3},
    ),
    "a step of the bare optimizer": Project(
        *("step_past_plugin", "error", "bare optimizer (AdamW)", "optimizer.step(closure=optimizer_closure)"),
        StepsTheBareOptimizer,
        _fp16,
    ),
    "a step without its closure": Project(
        *("step_past_plugin", "error", "MixedPrecision('16-mixed') then never makes a step", "step(closure="),
        StepsAfterTheClosure,
        _stock_fp16,
    ),
    "a bare backward": Project(
        *("step_past_plugin", "error", "loss.backward() itself", "self.manual_backward(loss)"), RawBackward, _fp16
    ),
    "a bare step in fp32": Project(
        *("step_past_plugin", "warning", "training_step calls step() of the bare", "self.optimizers()"), RawStep
    ),
    "clipping that does nothing": Project(
        *("clipping_ignored", "warning", "gradients are not clipped", "self.clip_gradients("),
        ForgetsToClip,
        lambda: {"gradient_clip_val": 1.0},
    ),
    "a negative clipping value": Project(
        *("clipping_ignored", "error", "gradient_clip_val=-1.0) is negative", "positive value"),
        trainer=lambda: {"gradient_clip_val": -1.0},
    ),
    "dropout drawn anew": Project(
        *("dropout_in_recompute", "error", "dropout has another mask", "preserve_rng_state"), OtherMasks
    ),
    "nothing to train": Project(
        *("untrained_weights", "error", "None of the 4 parameters", "requires_grad_(True)"),
        lambda: Net().requires_grad_(False),
    ),
    "a head that no optimizer has": Project(
        *("untrained_weights", "warning", "2 parameters have requires_grad=True", "requires_grad_(False)"),
        ForgottenHead,
    ),
    "an optimizer of another model": Project(
        *("untrained_weights", "error", "4 parameters have requires_grad=True", "requires_grad_(False)"), TrainsAnother
    ),
    "a layer without a gradient under DDP": Project(
        *("unused_weights", "error", "unused.weight", "ddp_find_unused_parameters_true"),
        changed(lambda module: setattr(module, "unused", nn.Linear(2, 2))),
        lambda: {"strategy": "ddp", "devices": 2},
    ),
    "a frozen norm that learns": Project(
        *("frozen_statistics", "warning", "1 BatchNorm layers are frozen", ".eval()"),
        changed(lambda module: module.net.insert(1, nn.BatchNorm1d(WIDTH).requires_grad_(False))),
    ),
    "a model left in eval mode": Project(  # as ``from_pretrained`` returns it
        *("eval_mode", "warning", "1 dropout or BatchNorm layers beside trainable weights", "module.train()"),
        changed(lambda module: module.net.insert(1, nn.Dropout(0.1)).eval()),
    ),
    "stochastic depth left in eval mode": Project(
        *("eval_mode", "warning", "1 dropout or BatchNorm layers beside trainable weights", "module.train()"),
        changed(lambda module: module.net.insert(1, DropPath(0.1)).insert(1, DropPath(0.0)).eval()),
    ),
    "a tied memory": Project(
        *("tied_weights", "error", "net.0.weight, net.1.weight share their memory", "as one parameter"),
        changed(_share_memory),
    ),
    "a schedule in optimizer steps, called once an epoch": Project(
        *("scheduler_length", "warning", "Lightning's default", "'interval': 'step'"),
        lambda: Scheduled(lambda optimizer, _: lr_scheduler.CosineAnnealingLR(optimizer, 5 * BATCHES)),
        lambda: {"max_epochs": 5},
    ),
    "a one-cycle schedule that is too short": Project(
        *("scheduler_length", "error", "number of epochs", "Give it total_steps=60"),
        lambda: Scheduled(partial(_one_cycle, steps=5)),
        lambda: {"max_epochs": 5},
    ),
    "a schedule in micro-batches": Project(
        *("scheduler_length", "warning", "number of micro-batches", "Give it T_max=30"),
        lambda: Scheduled(
            lambda o, _: {"scheduler": lr_scheduler.CosineAnnealingLR(o, 5 * BATCHES), "interval": "step"}
        ),
        lambda: {"max_epochs": 5, "accumulate_grad_batches": 2},
    ),
    "a warm-up and a cosine that rises again": Project(
        *("scheduler_length", "warning", "T_max=53) is called 60 times", "Give it T_max=60"),
        lambda: Scheduled(_cosine_after_warmup),
        lambda: {"max_epochs": 5},
    ),
    "a warm-up and a cosine without an end": Project(
        *("scheduler_length", "warning", "LambdaLR(lr_lambda=inf) never changes", "TokenLearningRate(WarmupCosine())"),
        lambda: Scheduled(_cosine_of_a_lambda),
        lambda: {"max_epochs": -1},
    ),
    "a budget beyond steps of a target batch": Project(
        *("budget", "warning", "with max_steps=5 there are 20 micro-batches", "without max_steps"),
        Tokens,
        lambda: {
            "callbacks": [ChinchillaBudget(tokens="1M"), AccumulationScheduler(target_tokens=32)],
            "max_epochs": -1,
            "max_steps": 5,
        },
        batches=lambda: token_batches([6] * BATCHES),
    ),
    "a budget beyond the data": Project(
        *("budget", "warning", "1,000,000 tokens is out of reach: with max_epochs=1", "max_epochs=-1"),
        Tokens,
        lambda: {"callbacks": [ChinchillaBudget(tokens="1M")]},
        batches=lambda: token_batches([6] * BATCHES),
    ),
    "a budget that counts frozen weights": Project(
        *("budget", "warning", "80% of them are frozen", "parameters='trainable'"),
        Tokens,
        lambda: {"callbacks": [ChinchillaBudget()], "max_epochs": -1},
        batches=lambda: token_batches([6] * BATCHES),
    ),
    "a model that does not fit": Project(
        *("memory", "error", "T4 has 14.9 GiB: it will not fit", "MicroBatchOnOOM()"),
        _huge,
        options={"device": "T4"},
        batches=lambda: [[torch.zeros(2, 80_000), torch.zeros(2, 1)]],
    ),
    "a weight that is used many times": Project(
        *("reused_weights", "advice", "(up to 15), and each use keeps a 16-bit copy for backward: together 7 MiB more"),
        "cache_weights=True",
        Unrolled,
        lambda: {"plugins": [MixedPrecision("bf16-mixed", "cpu")]},
        batches=lambda: [[torch.zeros(2, 512), torch.zeros(2, 1)]],
    ),
    "a weight that is used many times, manually": Project(
        *("reused_weights", "advice", "net.0.weight is used several times", "cache_weights=True"),
        ManualUnrolled,
        lambda: {"plugins": [AutocastPrecision("bf16-mixed")]},
        batches=lambda: [[torch.zeros(2, 512), torch.zeros(2, 1)]],
    ),
    "a checkpoint of another model": _of_checkpoint(
        "other_model", "error", "1 of another shape (net.0.weight)", "hyper-parameters"
    ),
    "a checkpoint of a finished run": _of_checkpoint(
        "finished", "error", "after 1 epoch, and max_steps=2, max_epochs=1 ends", "Raise the limit", max_steps=2
    ),
    "a checkpoint with another learning rate": _of_checkpoint(
        "other_rate", "warning", "learning rate of 0.001, and other_rate.ckpt has 0.01", "on_train_start"
    ),
    "a checkpoint with another optimizer": _of_checkpoint(
        "other_groups", "error", "groups of [2] parameters, and the run has [4]", "the same optimizers"
    ),
    "a checkpoint of an fp16 run": _of_checkpoint(
        "fp16", "warning", "holds a loss scale", "the plugin of the earlier run"
    ),
}


def write_checkpoints(folder: Path) -> None:
    """The checkpoints that projects resume from: of a finished run, of a run in fp16, and the first one edited."""
    finished = fit(Net(), regression_batches(BATCHES), max_steps=2)
    finished.save_checkpoint(folder / "finished.ckpt")
    fp16 = fit(Net(), regression_batches(1), max_steps=1, **_stock_fp16())
    fp16.save_checkpoint(folder / "fp16.ckpt")
    edits: dict[str, Callable[[dict[str, Any]], None]] = {
        "other_model": lambda saved: saved["state_dict"].update({"net.0.weight": torch.zeros(9, WIDTH)}),
        "other_rate": lambda saved: saved["optimizer_states"][0]["param_groups"][0].update(lr=0.01),
        "other_groups": lambda saved: saved["optimizer_states"][0]["param_groups"][0].update(params=[0, 1]),
    }
    for name, edit in edits.items():
        content = torch.load(folder / "finished.ckpt", weights_only=True)
        edit(content)
        torch.save(content, folder / f"{name}.ckpt")
