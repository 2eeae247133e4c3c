"""Micro-batches weigh what their loss averages over, under a plugin alone and with AccumulationScheduler."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import ResumableLoader, TokenModel, fit, quiet_trainer, weights
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    LossScaler,
    MFUMonitor,
    MicroBatchOnOOM,
    OverflowMonitor,
    TF32Precision,
    TokenLearningRate,
)

Loss = Callable[[nn.Module, Any], Tensor]
CLASSES = torch.tensor([0.2, 1.0, 3.0])


class OneLoss(pl.LightningModule):
    def __init__(self, loss: Loss, lr: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.loss, self.lr = nn.Linear(4, 3), loss, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def labelled(counts: tuple[int, ...], ignored: int = -100) -> list[list[Tensor]]:
    """Batches of 8 samples, of which so many have a label."""
    generator = torch.Generator().manual_seed(3)
    batches = [[torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)] for _ in counts]
    for (_, labels), count in zip(batches, counts, strict=True):
        labels[count:] = ignored
    return batches


def joined(batches: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def fitted(loss: Loss, batches: Any, *callbacks: Callback, weight_by: Any = "loss", **arguments: Any) -> list[Tensor]:
    module, plugin = OneLoss(loss), AutocastPrecision("bf16-mixed", weight_by=weight_by)
    fit(module, batches, *callbacks, plugin=plugin, **arguments)
    return weights(module)


def in_fp32(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return net(x)


LOSSES: dict[str, Loss] = {
    "classes": lambda net, b: F.cross_entropy(in_fp32(net, b[0]), b[1]),
    "class weights": lambda net, b: F.cross_entropy(in_fp32(net, b[0]), b[1], weight=CLASSES),
    "times a constant": lambda net, b: 0.3 * F.cross_entropy(in_fp32(net, b[0]), b[1]),
    "label smoothing": lambda net, b: F.cross_entropy(in_fp32(net, b[0]), b[1], label_smoothing=0.1),
    "two over the same targets": lambda net, b: (
        F.cross_entropy(in_fp32(net, b[0]), b[1]) + F.nll_loss(in_fp32(net, b[0]), b[1])
    ),
    "spatial": lambda net, b: F.cross_entropy(in_fp32(net, b[0]).T[None, :, :, None], b[1][None, :, None]),
    "labelled only": lambda net, b: F.cross_entropy(in_fp32(net, b[0][b[1] >= 0]), b[1][b[1] >= 0]),
    "elements": lambda net, b: F.mse_loss(in_fp32(net, b[0][b[1] >= 0]), torch.ones(int((b[1] >= 0).sum()), 3)),
    "masked sum": lambda net, b: (
        (F.cross_entropy(in_fp32(net, b[0]), b[1].clamp(min=0), reduction="none") * (b[1] >= 0)).sum()
        / (b[1] >= 0).sum()
    ),
    "masked sum, halved": lambda net, b: (
        F.cross_entropy(in_fp32(net, b[0]), b[1], reduction="sum") / (b[1] >= 0).float().sum() / 2
    ),
    "negative divisor": lambda net, b: (
        F.nll_loss(-F.log_softmax(in_fp32(net, b[0]), -1), b[1], reduction="sum") / -(b[1] >= 0).sum()
    ),
    "probabilities": lambda net, b: F.cross_entropy(
        in_fp32(net, b[0][b[1] >= 0]), F.one_hot(b[1][b[1] >= 0], 3) * 0.7 + 0.1, label_smoothing=0.1
    ),
    "mixed up": lambda net, b: (
        0.3 * F.cross_entropy(in_fp32(net, b[0][b[1] >= 0]), F.one_hot(b[1][b[1] >= 0], 3).float(), weight=CLASSES)
        + 0.7 * F.cross_entropy(in_fp32(net, b[0]), b[1])
    ),
    "spatial probabilities": lambda net, b: F.cross_entropy(
        in_fp32(net, b[0][b[1] >= 0]).T[None, :, :, None],
        F.one_hot(b[1][b[1] >= 0], 3).float().T[None, :, :, None],
    ),
    "mean of a vector": lambda net, b: in_fp32(net, b[0][b[1] >= 0]).square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=4, deadline=None)
@given(counts=st.tuples(*[st.integers(1, 8)] * 3))
def test_a_window_has_the_gradient_of_one_batch(name: str, counts: tuple[int, ...]) -> None:
    batches = labelled(counts)
    whole = fitted(LOSSES[name], [joined(batches)])
    torch.testing.assert_close(fitted(LOSSES[name], batches, accumulate_grad_batches=3), whole)
    torch.testing.assert_close(fitted(LOSSES[name], batches, AccumulationScheduler({0: 3})), whole)
    # A window that the epoch ends early.
    torch.testing.assert_close(fitted(LOSSES[name], batches, accumulate_grad_batches=5), whole)


@pytest.mark.parametrize("ignored", [255, 250, -1])
def test_ignore_index_is_the_losss_own(ignored: int) -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(in_fp32(net, batch[0]), batch[1], ignore_index=ignored)

    batches = labelled((2, 7), ignored)
    torch.testing.assert_close(
        fitted(loss, batches, accumulate_grad_batches=2), fitted(loss, [joined(batches)]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_without_weights_it_is_lightnings_to_the_bit(reduction: str) -> None:
    """A sum does not tell a mean; `weight_by=None` turns weights off."""

    def loss(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction=reduction)

    batches = labelled((2, 7, 3))
    module = OneLoss(loss)
    fit(module, batches, precision="bf16-mixed", accumulate_grad_batches=2)
    weight_by = "loss" if reduction == "sum" else None
    for callbacks in ([], [MFUMonitor(unit="sample")]):
        found = fitted(loss, batches, *callbacks, weight_by=weight_by, accumulate_grad_batches=2)
        assert all(map(torch.equal, found, weights(module)))


def test_equal_counts_are_lightnings_to_the_bit() -> None:
    batches = labelled((5, 5, 5, 5))
    module = OneLoss(LOSSES["classes"])
    fit(module, batches, precision="bf16-mixed", accumulate_grad_batches=2)
    assert all(map(torch.equal, fitted(LOSSES["classes"], batches, accumulate_grad_batches=2), weights(module)))


def test_a_monitor_changes_no_gradient() -> None:
    batches = labelled((1, 8, 4, 2))
    alone = fitted(LOSSES["classes"], batches, accumulate_grad_batches=2)
    watched = fitted(LOSSES["classes"], batches, MFUMonitor(unit="sample"), accumulate_grad_batches=2)
    assert all(map(torch.equal, alone, watched))


COUNTERS: dict[str, Callable[..., Callback]] = {
    "budget": lambda **count: ChinchillaBudget(tokens=10_000, landing="ceil", save=False, **count),
    "learning rate": lambda **count: TokenLearningRate(lambda _: 1.0, tokens=100, **count),
    "monitor": lambda **count: MFUMonitor(unit="token", **count),
}


@pytest.mark.filterwarnings("ignore:ChinchillaBudget")
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("name", COUNTERS)
def test_what_counts_tokens_of_its_own_changes_no_weight(name: str, splits: bool) -> None:
    """A count= of a budget, of a learning rate or of a monitor; inputs are counted, and the loss is over labels."""
    batches = [[torch.randint(0, 11, (4, 6)), torch.full((4, 6), -100)] for _ in range(4)]
    for (_, labels), number in zip(batches, (1, 6, 2, 4), strict=True):
        labels[:2, :number] = 3
        labels[3, 0] = 5
    trained = []
    for callbacks in ([], [COUNTERS[name](count=lambda batch: batch[0].numel() - 3)]):
        module = TokenModel()
        split = MicroBatchOnOOM()
        split.size = 2  # as after an out-of-memory error
        callbacks += [split] * splits
        fit(module, batches, AccumulationScheduler({0: 2}), *callbacks, plugin=AutocastPrecision("bf16-mixed"))
        trained.append(weights(module))
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("declared", [True, False])
def test_a_sum_over_the_number_in_the_batch_is_a_mean(declared: bool) -> None:
    """As Hugging Face's models take ``num_items_in_batch``: the number of the window's targets, or of the batch's."""

    def loss(net: nn.Module, batch: Any) -> Tensor:
        summed = F.cross_entropy(in_fp32(net, batch["x"]), batch["y"], reduction="sum")
        return summed / batch["num_items_in_batch" if declared else "count"]

    def named(batches: list[list[Tensor]], count: int) -> list[dict[str, Any]]:
        own = [int((y >= 0).sum()) for _, y in batches]
        return [
            {"x": x, "y": y, "num_items_in_batch": count, "count": n} for (x, y), n in zip(batches, own, strict=True)
        ]

    batches = labelled((1, 8, 3))
    whole = fitted(loss, named([joined(batches)], 12))
    for count in (12, 5):
        torch.testing.assert_close(fitted(loss, named(batches, count), accumulate_grad_batches=3), whole)


@pytest.mark.filterwarnings("ignore:ChinchillaBudget")
@pytest.mark.parametrize("name", ["", "budget", "monitor"])
def test_ranks_with_unequal_counts_have_the_gradient_of_one_batch(name: str) -> None:
    """Also where something counts in its own way."""
    batches = labelled((1, 8, 4, 2))

    def on_rank(rank: int) -> list[list[Tensor]]:
        return [
            fitted(
                LOSSES["classes"],
                batches[rank::2],
                *([COUNTERS[name](count=lambda batch: 3)] if name else []),
                devices=2,
                strategy=DDPStrategy(process_group_backend="gloo"),
                accumulate_grad_batches=micro_batches,
            )
            for micro_batches in (2, 1)
        ]

    whole = [fitted(LOSSES["classes"], [joined(batches)])]
    whole.append(fitted(LOSSES["classes"], [joined(batches[:2]), joined(batches[2:])]))
    for found in run_ranks(on_rank, 2):
        torch.testing.assert_close(found, whole)


def test_a_rank_whose_first_batch_has_no_label_weighs_nothing_there() -> None:
    """It returns a zero loss, as DDP needs one on every rank."""
    batches = labelled((0, 8, 4, 2))

    def loss(net: nn.Module, batch: Any) -> Tensor:
        if not (batch[1] >= 0).any():
            return net(batch[0]).sum() * 0.0
        return F.cross_entropy(in_fp32(net, batch[0]), batch[1])

    def on_rank(rank: int) -> list[Tensor]:
        return fitted(loss, batches[rank::2], devices=2, strategy=DDPStrategy(process_group_backend="gloo"))

    whole = fitted(LOSSES["classes"], [joined(batches[:2]), joined(batches[2:])])
    for found in run_ranks(on_rank, 2):
        torch.testing.assert_close(found, whole)


def checkpoint(folder: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1)


def test_micro_batch_on_oom_changes_no_weight() -> None:
    batches = labelled((1, 8, 4))
    alone = fitted(LOSSES["classes"], batches, accumulate_grad_batches=2)
    watched = fitted(LOSSES["classes"], batches, MicroBatchOnOOM(), accumulate_grad_batches=2)
    assert all(map(torch.equal, alone, watched))


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Any) -> None:
    batches = labelled((1, 8, 4, 2))
    whole = fitted(LOSSES["classes"], batches, accumulate_grad_batches=2)
    first = quiet_trainer(
        plugins=[AutocastPrecision("bf16-mixed")],
        accumulate_grad_batches=2,
        max_steps=1,
        callbacks=[checkpoint(tmp_path)],
        enable_checkpointing=True,
    )
    module = OneLoss(LOSSES["classes"])
    first.fit(module, ResumableLoader(batches))
    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=True)
    assert saved["lightning_mp_loss_weights"]["losses"]["totals"] == [1.0]
    assert not any("Accumulation" in key for key in saved["callbacks"])
    assert not all(map(torch.equal, whole, weights(module)))
    module = OneLoss(LOSSES["classes"])
    second = quiet_trainer(
        plugins=[AutocastPrecision("bf16-mixed")],
        accumulate_grad_batches=2,
        callbacks=[checkpoint(tmp_path)],
        enable_checkpointing=True,
    )
    second.fit(module, ResumableLoader(batches), ckpt_path=tmp_path / "step=1.ckpt", weights_only=True)
    assert all(map(torch.equal, whole, weights(module)))


@pytest.mark.parametrize(
    ("arguments", "weight"),
    [({"weight_by": "token"}, "their target tokens, 8 and 16"), ({"count": lambda batch: 3}, "count=, 3 and 3")],
)
def test_a_chosen_weight_that_the_loss_does_not_average_over_is_reported(
    arguments: dict[str, Any], weight: str
) -> None:
    """Labels of another ``ignore_index`` count as tokens: both numbers are in the warning."""

    def loss(net: nn.Module, batch: Any) -> Tensor:
        logits = in_fp32(net, batch[0]).expand(-1, batch[1].shape[1], -1)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), ignore_index=255)

    batches = []
    for samples, ignored in ((4, 3), (8, 1)):
        labels = torch.randint(0, 3, (samples, 2))
        labels.view(-1)[:ignored] = 255
        batches.append([torch.randn(samples, 1, 4), labels])
    with pytest.warns(
        UserWarning, match=rf"weighted by {weight} in two of them, but their losses average over 5 and 15"
    ):
        fitted(loss, batches, AccumulationScheduler({0: 2}, **arguments))
    fitted(loss, [batches[0], batches[0]], AccumulationScheduler({0: 2}, **arguments))  # a constant ratio


def test_means_over_different_numbers_are_reported() -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        logits = in_fp32(net, batch[0])
        return F.cross_entropy(logits, batch[1]) + F.cross_entropy(logits[:2], batch[1][:2])

    for _ in range(2):  # also in the second fit of a process
        with pytest.warns(UserWarning, match="adds means over 3 and 2 items, and the first loss over 5 and 2"):
            fitted(loss, labelled((5, 3)), accumulate_grad_batches=2)


def test_a_loss_that_shows_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="sum")

    with caplog.at_level("INFO"):
        fitted(loss, labelled((5, 3)), accumulate_grad_batches=2)
    assert (
        "micro-batches have equal weights from here on, as in Lightning, because the items of a loss are unknown: it is"
        " a sum that nothing divides. To weight them" in caplog.text
    )


class Closure(torch.optim.SGD):
    """As schedule-free optimizers, Prodigy or Adafactor of transformers are written."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


class Again(torch.optim.SGD):
    """Evaluates the loss twice."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = closure()
        closure()
        super().step()
        return loss


class Sets(Callback):
    """Writes the number of micro-batches; Lightning reads it for each of them."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._set)

    def _set(self, trainer: "pl.Trainer", *args: Any) -> None:
        trainer.accumulate_grad_batches = 3


DRIVERS: dict[str, tuple[Callable[[], list[Callback]], dict[str, Any]]] = {
    "Trainer": (list, {"accumulate_grad_batches": 3}),
    "scheduler": (lambda: [AccumulationScheduler({0: 3})], {}),
    "stock scheduler": (lambda: [GradientAccumulationScheduler({0: 3})], {}),
    "on_train_start": (lambda: [Sets("on_train_start")], {}),
    "on_train_epoch_start": (lambda: [Sets("on_train_epoch_start")], {}),
    "on_train_batch_start": (lambda: [Sets("on_train_batch_start")], {}),
}


class Driven(OneLoss):
    def __init__(self, loss: Loss, kind: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(loss)
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Closure])
@pytest.mark.parametrize("driver", DRIVERS)
def test_whoever_sets_the_number_and_whatever_steps(driver: str, optimizer: Any) -> None:
    callbacks, arguments = DRIVERS[driver]
    batches = labelled((1, 8, 4, 2))  # the last window is short
    module = Driven(LOSSES["classes"], optimizer)
    fit(module, batches, *callbacks(), plugin=AutocastPrecision("bf16-mixed"), **arguments)
    whole = fitted(LOSSES["classes"], [joined(batches[:3]), batches[3]])
    torch.testing.assert_close(weights(module), whole)


class Surgery(OneLoss):
    """Writes the gradient of its own loss."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (self.loss(self.net, self.batch) / 2).backward()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch = batch
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("arguments", [{"weight_by": "auto"}, {"count": lambda batch: 3}, None])
def test_a_module_that_writes_gradients_itself_has_lightnings_arithmetic(
    arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    batches, trained = labelled((1, 8)), []
    callbacks, accumulation = ([], {"accumulate_grad_batches": 2}) if arguments is None else ([True], {})
    for ours in (True, False):
        module = Surgery(LOSSES["classes"])
        if not ours:
            fit(module, batches, precision="bf16-mixed", accumulate_grad_batches=2)
        else:
            scheduler = [AccumulationScheduler({0: 2}, **arguments) for _ in callbacks]
            with caplog.at_level("INFO"):
                fit(module, batches, *scheduler, plugin=AutocastPrecision("bf16-mixed"), **accumulation)
            assert "the items of a loss are unknown: Surgery.backward may write gradients" in caplog.text
        trained.append(weights(module))
    assert all(map(torch.equal, *trained))


class Auxiliary(OneLoss):
    """Runs the backward of another loss itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            (self.net(batch[0]).float().square().sum() / 2).backward()
        return super().training_step(batch, batch_idx)


def test_a_training_step_that_runs_a_backward_ends_the_weights() -> None:
    """The line comes in the first window; the second one has Lightning's arithmetic."""
    batches, gradients = labelled((1, 8, 2, 5)), []
    for arguments in ({"plugin": AutocastPrecision("bf16-mixed")}, {"precision": "bf16-mixed"}):
        module, seen = Auxiliary(LOSSES["classes"], lr=0.0), []
        module.on_before_optimizer_step = lambda _, m=module, s=seen: s.append([p.grad.clone() for p in m.parameters()])
        warned = pytest.warns(UserWarning, match="equal weights.*: training_step writes gradients itself")
        with warned if "plugin" in arguments else nullcontext():
            fit(module, batches, accumulate_grad_batches=2, **arguments)
        gradients.append(seen[1])
    assert all(map(torch.equal, *gradients))


def test_an_optimizer_that_evaluates_again_has_equal_weights(caplog: pytest.LogCaptureFixture) -> None:
    batches, trained = labelled((1, 8)), []
    for ours in (True, False):
        module = Driven(LOSSES["classes"], Again)
        if not ours:
            fit(module, batches, precision="bf16-mixed", accumulate_grad_batches=2)
        else:
            with caplog.at_level("INFO"):
                fit(module, batches, plugin=AutocastPrecision("bf16-mixed"), accumulate_grad_batches=2)
            assert "are unknown: Again evaluates the loss again inside of a step" in caplog.text
        trained.append(weights(module))
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("bad", [-3, math.nan, None, torch.tensor(-1), torch.tensor(math.inf), torch.ones(2)])
def test_a_count_that_is_none_ends_the_weights_and_nothing_else(bad: Any) -> None:
    numbers = iter([3, bad, 2, 2])
    with pytest.warns(UserWarning, match=r"equal weights.*: count= returned .*, which is no count"):
        fitted(
            LOSSES["mean of a vector"],
            [[x, y] for x, y in labelled((8, 8, 8, 8))],
            AccumulationScheduler({0: 2}, count=lambda batch: next(numbers)),
        )


@pytest.mark.parametrize("first", [1, 1000])
def test_a_first_micro_batch_unlike_the_others_skips_no_step(first: int) -> None:
    """Loss factors stay near 1, which fp16 holds."""

    def batch(labels: int) -> list[Tensor]:
        y = torch.full((1024,), -100)
        y[:labels] = 1
        return [torch.randn(1024, 4), y]

    batches = [batch(first), *(batch(n) for n in (400, 1024, 700, 512, 900))]
    module, monitor = OneLoss(LOSSES["classes"]), OverflowMonitor()
    scaler = LossScaler(init_scale=2.0**15)
    fit(module, batches, monitor, plugin=AutocastPrecision("16-mixed", scaler=scaler), accumulate_grad_batches=2)
    assert monitor.skipped_steps == 0


class Fetching(OneLoss):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return self.loss(self.net, batch)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter`")
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("driver", ["Trainer", "scheduler", "stock scheduler"])
def test_a_step_that_fetches_its_batches_has_the_same_weights(driver: str, sized: bool) -> None:
    callbacks, arguments = DRIVERS[driver]
    batches = labelled((1, 8, 4, 2, 5, 3))
    module = Fetching(LOSSES["classes"])
    data: Any = batches if sized else Stream(batches)
    fit(module, data, *callbacks(), plugin=AutocastPrecision("bf16-mixed"), **arguments)
    whole = fitted(LOSSES["classes"], [joined(batches[:3]), joined(batches[3:])])
    torch.testing.assert_close(weights(module), whole)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter`")
@pytest.mark.filterwarnings("ignore:ChinchillaBudget")
@pytest.mark.parametrize("name", ["budget", "monitor", "weight"])
def test_a_step_that_fetches_its_batches_cannot_be_counted(name: str) -> None:
    callback = AccumulationScheduler({0: 2}, weight_by="token") if name == "weight" else COUNTERS[name]()
    with pytest.raises(
        MisconfigurationException, match="fetches its batches itself, so nothing can count their tokens"
    ):
        fit(Fetching(LOSSES["classes"]), labelled((1, 8)), callback, plugin=AutocastPrecision("bf16-mixed"))


def test_another_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TF32Precision\(weight_by='token'\) is unknown; it must be 'loss' or None"):
        TF32Precision(weight_by="token")  # type: ignore[arg-type]
