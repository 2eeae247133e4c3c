"""The post-mortem names overflows that were planted at a known place, and leaves no trace."""

import math
import random
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import small_models
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import MixedPrecision
from planted_oom import out_of_memory
from planted_overflows import (
    Attention,
    LogOfZero,
    Planted,
    RootOfZero,
    TimesInBackward,
    TimesInForward,
    numbered_batches,
)
from small_models import adamw, fused_adamw, loader, quiet_trainer
from torch import nn

from lightning_mp import AutocastPrecision, LossScaler, MicroBatchOnOOM, OverflowMonitor, OverflowPostMortem

ROOT = Path(__file__).resolve().parents[2]
SCALE = 1024.0
INF = math.inf


def ours() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=SCALE))


def stock() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))


def identity(trigger: Any) -> nn.Module:
    return nn.Identity()


def spoil_input(module: Planted, batch: Any) -> None:
    batch[0][0, 0] = math.nan


def spoil_weight(module: Planted, batch: Any) -> None:
    module.body[1].up.weight.data[0, 0] = INF


def forward(factor: float = 1e6, **settings: Any) -> Any:
    return partial(Planted, partial(TimesInForward, factor=factor), **settings)


def backward(factor: float = INF, **settings: Any) -> Any:
    return partial(Planted, partial(TimesInBackward, factor=factor), **settings)


def loss(spoil: Any) -> Any:
    return partial(Planted, identity, spoil_loss=spoil)


PLACE = "body.1.place"
OUTPUT, SOFTMAX = (PLACE, "output"), (PLACE, "argument 'input' of body.1.place.softmax")
GRADIENT, OF_LOSS = (PLACE, "gradient of argument 'x'"), ("", "gradient of output of criterion")
# name: the module, then phase, module and tensor, verdict, whether fp32 is finite, whether a lower scale is.
PLANTED: dict[str, tuple[Any, str, tuple[str, str], str, bool | None, bool]] = {
    "forward, too large for fp16": (forward(), "forward", OUTPUT, "range", True, False),
    "forward, log of zero": (partial(Planted, LogOfZero), "forward", OUTPUT, "model", False, False),
    "forward, attention scores": (partial(Planted, Attention), "forward", SOFTMAX, "range", True, False),
    "loss, in the training step": (loss(lambda loss: loss / 0), "loss", ("", "the loss"), "model", False, False),
    "loss, minus infinity": (loss(lambda loss: loss * -INF), "loss", ("", "the loss"), "model", False, False),
    "backward, loss scale too high": (backward(2e4), "backward", GRADIENT, "scale", None, True),
    "backward, too large for fp16 at scale 1": (backward(1e10), "backward", GRADIENT, "range", True, False),
    "backward, custom function": (backward(), "backward", GRADIENT, "model", False, False),
    "backward, root of zero": (partial(Planted, RootOfZero), "backward", GRADIENT, "model", False, False),
    "backward, of the loss": (
        loss(lambda loss: loss + (loss.detach() * 0 + 0 * loss).sqrt()),
        *("backward", OF_LOSS, "model", False, False),
    ),
    "data": (partial(Planted, identity, spoil=spoil_input), "data", ("", "batch[0]"), "data", None, False),
    "weights": (
        partial(Planted, identity, spoil=spoil_weight),
        *("weights", ("body.1.up", "weight"), "weights", None, False),
    ),
    **{
        f"behind a {name}, {phase}": (make(reentrant=reentrant), phase, place, verdict, verdict == "range", False)
        for name, reentrant in (("checkpoint", False), ("reentrant checkpoint", True))
        for phase, make, place, verdict in (
            ("forward", forward, OUTPUT, "range"),
            ("backward", backward, GRADIENT, "model"),
        )
    },
}


def fit(module: Any, plugin: Any, tmp_path: Path, num_batches: int = 4, **arguments: Any) -> OverflowPostMortem:
    post_mortem = OverflowPostMortem(replay=True, dirpath=tmp_path)
    callbacks = [post_mortem] if isinstance(plugin, AutocastPrecision) else [post_mortem, OverflowMonitor()]
    small_models.fit(module, numbered_batches(num_batches), *callbacks, plugin=plugin, **arguments)
    assert post_mortem.reports, "no step was skipped"
    return post_mortem


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize(
    ("name", "plugin"),
    [
        *((name, ours) for name in PLANTED),
        *((name, stock) for name in ("forward, too large for fp16", "backward, loss scale too high", "data")),
        ("loss, in the training step", stock),
    ],
)
def test_planted_overflows_are_named(name: str, plugin: Any, optimizer: Any, tmp_path: Path) -> None:
    make, phase, (module, tensor), verdict, finite_in_fp32, finite_below = PLANTED[name]
    report = fit(make(optimizer=optimizer), plugin(), tmp_path).reports[0]
    assert (report.step_index, report.note) == (2, "")
    [finding] = report.findings
    first = finding.first_overflow
    assert (first.phase, first.module, first.tensor) == (phase, module, tensor), report
    assert (finding.verdict, finding.finite_in_fp32) == (verdict, finite_in_fp32), report
    assert (finding.finite_scale is not None) == finite_below
    assert (finding.batch_idx, finding.rank) == (2, 0)


def test_without_a_loss_scale(tmp_path: Path) -> None:
    """bf16: our plugin skips non-finite steps there, too."""
    module = Planted(partial(TimesInBackward, factor=INF), optimizer=fused_adamw)
    report = fit(module, AutocastPrecision("bf16-mixed"), tmp_path).reports[0]
    (finding,) = report.findings
    assert (report.loss_scale, finding.verdict, finding.first_overflow.module) == (1.0, "model", PLACE)
    assert finding.first_overflow.dtype == "bfloat16"


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_the_micro_batch_of_a_window_is_named(optimizer: Any, tmp_path: Path) -> None:
    module = Planted(partial(TimesInBackward, factor=INF), planted=[4], optimizer=optimizer)
    post_mortem = fit(module, ours(), tmp_path, num_batches=9, accumulate_grad_batches=3)
    (report,) = post_mortem.reports
    (finding,) = report.findings
    assert (report.step_index, finding.micro_batch, finding.num_micro_batches, finding.batch_idx) == (1, 1, 3, 4)
    assert finding.first_overflow.module == PLACE


@pytest.mark.parametrize(("micro_batches", "weight"), [(1, 1.0), (4, 1.0), (1, 64.0)])
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_the_largest_finite_scale_equals_that_of_a_plain_loop(
    optimizer: Any, micro_batches: int, weight: float, tmp_path: Path
) -> None:
    """Also where the loss is divided by the length of the window, or weighed in place."""

    class Weighed(Planted):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            loss.mul_(weight)

    def make() -> Planted:
        module = Weighed(partial(TimesInBackward, factor=2e4), planted=[0], optimizer=optimizer)
        module.body[3].p = 0.0
        return module

    scale, module, batch = SCALE, make(), numbered_batches(1)[0]
    module.log = lambda *_, **__: None
    module.trainer = quiet_trainer()
    while True:
        module.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = module.training_step(batch, 0)
        (loss * scale / micro_batches * weight).backward()
        if all(p.grad is None or p.grad.isfinite().all() for p in module.parameters()):
            break
        scale /= 2
    post_mortem = fit(make(), ours(), tmp_path, num_batches=micro_batches, accumulate_grad_batches=micro_batches)
    finding = post_mortem.reports[0].findings[0]
    if scale >= 1.0:
        assert finding.finite_scale == scale < SCALE
    else:
        assert (finding.finite_scale, finding.verdict) == (None, "range")


@pytest.mark.parametrize("source", ["torch", "python", "numpy"])
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_an_overflow_by_chance_comes_again(optimizer: Any, source: str, tmp_path: Path) -> None:
    draw = {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": np.random.rand}[source]
    drawn: list[float] = []

    class ByChance(TimesInForward):
        """At one number that was drawn, and whenever it is drawn again."""

        def forward(self, x: Any) -> Any:
            number = draw()
            if len(drawn) == 2:
                wanted.append(number)
            drawn.append(number)
            return x * 1e6 if number in wanted else x

    wanted: list[float] = []
    module = Planted(partial(ByChance, factor=1e6), planted=[], optimizer=optimizer)
    report = fit(module, ours(), tmp_path).reports[0]
    assert (report.step_index, report.findings[0].first_overflow.module) == (2, PLACE)


def test_fp32_draws_the_same_random_numbers(tmp_path: Path) -> None:
    drawn: list[float] = []

    class ByChance(TimesInForward):
        """Never finite at one number that was drawn, in no format."""

        def forward(self, x: Any) -> Any:
            drawn.append(torch.rand(()).item())
            return x * INF if drawn[-1] in drawn[2:3] else x

    module = Planted(partial(ByChance, factor=1.0), planted=[])
    (finding,) = fit(module, ours(), tmp_path).reports[0].findings
    assert (finding.first_overflow.module, finding.finite_in_fp32, finding.verdict) == (PLACE, False, "model")


@pytest.mark.parametrize("to", [torch.half, torch.float32], ids=["half", "float"])
def test_a_cast_in_the_modules_own_code_is_no_verdict_about_fp32(to: torch.dtype, tmp_path: Path) -> None:
    class Casts(TimesInForward):
        def forward(self, x: Any) -> Any:
            factor = torch.tensor(INF if to == torch.float32 else 1e6)
            return (x.float() * factor).to(to).float() if self.trigger.on else x

    (finding,) = fit(Planted(partial(Casts, factor=1.0)), ours(), tmp_path).reports[0].findings
    in_fp32 = None if to == torch.half else False
    assert (finding.first_overflow.module, finding.finite_in_fp32, finding.verdict) == (PLACE, in_fp32, "model")


def test_under_masters_a_replay_in_fp32_is_one(tmp_path: Path) -> None:
    from lightning_mp import MasterWeightsPrecision

    class Lowered(Planted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.head(self.body(batch[0].to(self.head.weight))).float().mean()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trigger.on = batch_idx in self.planted

    plugin = MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=SCALE))
    post_mortem = OverflowPostMortem(replay=True, dirpath=tmp_path)
    small_models.fit(Lowered(partial(TimesInForward, factor=1e6)), numbered_batches(4), post_mortem, plugin=plugin)
    (finding,) = post_mortem.reports[0].findings
    assert (finding.first_overflow.module, finding.finite_in_fp32, finding.verdict) == (PLACE, True, "range")


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("compiled", ["submodule", "module"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_under_torch_compile(compiled: str, optimizer: Any, tmp_path: Path) -> None:
    class Compiled(Planted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.criterion(self.head(self.body(batch[0])).float(), batch[1])

    class Kept(TimesInForward):
        """Goes by the number in the batch, without a graph break."""

        def forward(self, x: Any) -> Any:
            return x * torch.where(x.abs().amax() > 50, self.factor, 1.0)

    module = Compiled(partial(Kept, factor=1e6), optimizer=optimizer, spoil=lambda _, batch: batch[0].mul_(1e3))
    module.body[1].norm = nn.Identity()
    if compiled == "submodule":
        module.body = torch.compile(module.body, backend="eager")
    else:
        module = torch.compile(module, backend="eager")
    post_mortem = fit(module, ours(), tmp_path)
    finding = post_mortem.reports[0].findings[0]
    assert (finding.first_overflow.phase, finding.first_overflow.module, finding.verdict) == ("forward", PLACE, "range")
    assert "body.1.up.weight" in post_mortem.reports[0].parameters


def test_a_sum_of_finite_gradients_that_does_not_fit(tmp_path: Path) -> None:
    """16-bit gradients are added up over the window."""
    from lightning_mp import MasterWeightsPrecision

    class Plain(Planted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            # Per micro-batch 40000 in the gradient of the bias; fp16 ends at 65504.
            bias = self.head(torch.zeros(1, self.head.in_features)).float().sum()
            return bias * 40000.0 * 4 / SCALE if 2 <= batch_idx < 4 else bias

    plugin = MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=SCALE))
    post_mortem = OverflowPostMortem(replay=True, dirpath=tmp_path)
    small_models.fit(Plain(identity), numbered_batches(4), post_mortem, plugin=plugin, accumulate_grad_batches=4)
    assert "every gradient is finite, their sum is not" in str(post_mortem.reports[0])
    (finding,) = post_mortem.reports[0].findings
    assert (finding.verdict, finding.micro_batch, finding.first_overflow) == ("sum", 3, None)


def test_buffers_that_the_forward_spoilt_are_named(tmp_path: Path) -> None:
    """A skipped step leaves nan in running statistics; they are not taken for its cause."""
    report = fit(Planted(partial(TimesInForward, factor=1e6)), ours(), tmp_path).reports[0]
    assert report.buffers == ["body.2.running_mean", "body.2.running_var"]
    assert report.findings[0].verdict == "range"
    assert "The buffers body.2.running_mean" in str(report)


@pytest.mark.full
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_an_overflow_that_nobody_planted(fused: bool, tmp_path: Path) -> None:
    """A byte-level GPT in fp16 at learning rate 3e-3 whose loss scale grows until the gradients overflow.

    The largest finite scale is checked by plain PyTorch on the weights of that moment.
    """
    from lightning_mp.language_model import GPT, GPTConfig

    text = torch.frombuffer(bytearray((ROOT / "LICENSE").read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - 33, (200, 8), generator=generator)
    batches = [torch.stack([text[s : s + 33] for s in row]) for row in starts.tolist()]

    class Language(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gpt = GPT(GPTConfig(layers=2, heads=2, width=32, block_tokens=32))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.gpt(batch[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=fused)

        def on_after_optimizer_step(self, optimizer: Any, outcome: Any) -> None:
            if outcome.skipped and not self.trainer.should_stop:
                self.trainer.should_stop = True
                self.then = deepcopy(self.state_dict())

        def is_finite(self, batch: Any, scale: float) -> bool:
            self.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = self.training_step(batch, 0)
            (loss * scale).backward()
            return all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.parameters())

    module, post_mortem = Language(), OverflowPostMortem(replay=True, dirpath=tmp_path)
    plugin = AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**12, growth_interval=4, max_scale=2.0**40))
    small_models.fit(module, batches, post_mortem, plugin=plugin)
    report = post_mortem.reports[0]
    assert "the loss scale was too high" in str(report)
    (finding,) = report.findings
    assert (finding.verdict, finding.first_overflow.phase) == ("scale", "backward")
    module.load_state_dict(module.then)
    assert finding.first_overflow.module in {name for name, _ in module.named_modules()}
    batch = batches[report.step_index]
    assert not module.is_finite(batch, report.loss_scale)
    assert module.is_finite(batch, finding.finite_scale)
    assert not module.is_finite(batch, 2 * finding.finite_scale)


@pytest.mark.parametrize("limit", [2, 1], ids=["fits", "does not fit"])
@pytest.mark.parametrize("size", [None, 1])
def test_a_batch_that_ran_in_parts_is_replayed_whole(size: int | None, limit: int) -> None:
    """Where it does not fit, the report says so."""

    class Large(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch) > limit and torch.is_grad_enabled():
                out_of_memory()
            return self.layer(batch).float().mean() * 8

    split = MicroBatchOnOOM()
    split.size = size
    post_mortem = OverflowPostMortem(replay=True)
    trainer = quiet_trainer(
        plugins=[AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=2.0**20))],
        callbacks=[OverflowMonitor(), post_mortem, split],
        max_steps=2,
    )
    trainer.fit(Large(), loader([torch.ones(2, 32)] * 4))
    findings = [finding for report in post_mortem.reports for finding in report.findings]
    if limit == 2:
        assert {(one.verdict, one.num_micro_batches, one.finite_scale) for one in findings} == {("scale", 1, 2.0**13)}
    else:
        assert not findings
        assert "OutOfMemoryError: CUDA out of memory" in str(post_mortem.reports[0])
    skipped = len(post_mortem.reports)
    assert skipped
    assert trainer.precision_plugin.scaler.get_scale() == 2.0 ** (20 - skipped)
