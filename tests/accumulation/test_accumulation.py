"""AccumulationScheduler: exact means over windows of any length, against plain PyTorch loops and one large batch."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from small_models import (
    Regression,
    TokenModel,
    adamw,
    at,
    fit,
    fused_adamw,
    loader,
    quiet_trainer,
    regression_batches,
    saving,
    sgd,
    token_batches,
    weights,
)
from torch import Tensor, nn

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler
from lightning_mp.training.accumulation.controller import AccumulateGradBatches, AccumulationController
from lightning_mp.training.gradients.gradient_ops import clip_coefficient


class Steps(Callback):
    """Which micro-batches make each optimizer step, and the gradient each step takes."""

    def __init__(self) -> None:
        self.windows: list[list[int]] = []
        self.gradients: list[list[Tensor]] = []
        self._open: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._open.append(batch_idx)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append([p.grad.clone() for p in pl_module.parameters()])
        self.windows.append(self._open)
        self._open = []


def run(module: pl.LightningModule, batches: list[Any], scheduler: Callback | None, **arguments: Any) -> Steps:
    steps = Steps()
    callbacks = [steps, *([scheduler] if scheduler is not None else [])]
    fit(module, batches, callbacks=callbacks, **arguments)
    return steps


def test_window_answers_lightnings_two_questions() -> None:
    for opens in (False, True):
        for closes in (False, True):
            window = AccumulateGradBatches(3, {7: int(not opens), 8: int(not closes)})
            assert (7 % window == 0) is opens
            assert (8 % window == 0) is closes
            assert (window, 12 / window, 10 % window) == (3, 4.0, 1)


# -- exactness ---------------------------------------------------------------------------------------------------------


def plain_loop(
    module: Regression | TokenModel,
    batches: list[Any],
    windows: Sequence[Sequence[int]],
    nominal: int,
    counts: list[int],
) -> list[list[Tensor]]:
    """The same recipe by hand: loss / N * (n_i / n_0), then the sum times n_0 * N / total."""
    optimizer = module.make_optimizer(module.parameters())
    gradients = []
    for window in windows:
        optimizer.zero_grad()
        for index in window:
            loss = module.training_step(batches[index], index) / nominal
            (loss * torch.tensor(counts[index] / counts[0])).backward()
        total = sum(counts[index] for index in window)
        factor = counts[0] * nominal / total
        for p in module.parameters():
            p.grad.mul_(factor)
        gradients.append([p.grad.clone() for p in module.parameters()])
        optimizer.step()
    return gradients


@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["sgd", "adamw"])
def test_fp32_equals_a_plain_loop_bit_for_bit(optimizer: Any) -> None:
    counts = [6, 3, 11, 8, 2, 9, 7, 4, 10, 5]
    batches = token_batches(counts)
    module = TokenModel(optimizer)
    steps = run(module, batches, AccumulationScheduler({0: 4}))
    windows = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert steps.windows == windows
    reference = TokenModel(optimizer)
    for ours, theirs in zip(steps.gradients, plain_loop(reference, batches, windows, 4, counts), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(weights(module), weights(reference), strict=True):
        assert torch.equal(a, b)


def test_equal_micro_batches_equal_stock_lightning_bit_for_bit() -> None:
    batches = regression_batches(8)
    ours, stock = Regression(adamw), Regression(adamw)
    run(ours, batches, AccumulationScheduler({0: 4}))
    run(stock, batches, None, accumulate_grad_batches=4)
    for a, b in zip(weights(ours), weights(stock), strict=True):
        assert torch.equal(a, b)


def large_batch_gradient(module: TokenModel, batches: list[Any], window: Sequence[int]) -> list[Tensor]:
    """The token mean over the whole window, in float64."""
    double = TokenModel().double()
    double.load_state_dict(module.state_dict())
    logits = torch.cat([double.head(double.embedding(batches[i][0])).flatten(0, 1) for i in window])
    labels = torch.cat([batches[i][1].flatten() for i in window])
    nn.functional.cross_entropy(logits, labels).backward()
    return [p.grad for p in double.parameters()]


PRECISIONS = {
    "fp32": (list, 1e-6),
    "bf16": (lambda: [AutocastPrecision("bf16-mixed")], 2e-2),
    "fp16": (lambda: [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))], 2e-3),
}


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_window_equals_one_large_batch(precision: str, fused: bool) -> None:
    """D29, D30: ragged tokens and a short last window. The learning rate is 0, so all windows see the same weights."""
    plugins, tolerance = PRECISIONS[precision]
    counts = [16, 2, 9, 31, 1, 5, 12]
    batches = token_batches(counts)
    module = TokenModel(lambda p: torch.optim.SGD(p, lr=0.0, fused=fused))
    steps = run(module, batches, AccumulationScheduler({0: 3}), plugins=plugins())
    assert steps.windows == [[0, 1, 2], [3, 4, 5], [6]]
    for window, gradient in zip(steps.windows, steps.gradients, strict=True):
        expected = large_batch_gradient(module, batches, window)
        scale = max(e.abs().max() for e in expected)
        for ours, theirs in zip(gradient, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance * scale.item())


def test_a_fused_step_divides_by_the_count_without_writing_gradients() -> None:
    """Promise 5 with token weights: the normalisation rides in the optimizer's kernel."""
    from gradient_counter import CountGradientTraffic

    counts = [16, 2, 9, 31, 1, 5, 12, 7]
    batches = token_batches(counts)
    module, reference = TokenModel(fused_adamw), TokenModel(fused_adamw)
    plugins = [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))]
    counter = CountGradientTraffic(module)
    fit(module, batches, counter, AccumulationScheduler({0: 2}), plugins=plugins, gradient_clip_val=0.1)
    stepped = counter.rows[5]
    assert (stepped.passes, stepped.kernels) == (1.0, {"aten::_foreach_norm": 1})

    optimizer = reference.make_optimizer(reference.parameters())
    for first in range(0, len(batches), 2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            losses = [reference.training_step(batches[i], i) * counts[i] for i in (first, first + 1)]
        (sum(losses) / sum(counts[first : first + 2]) * 1024.0).backward()
        gradients = [p.grad for p in reference.parameters()]
        torch._foreach_div_(gradients, 1024.0)
        coefficient = clip_coefficient(torch.stack(torch._foreach_norm(gradients)).norm(), 0.1)
        torch._foreach_mul_(gradients, coefficient)
        optimizer.step()
    for a, b in zip(weights(module), weights(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


@pytest.mark.filterwarnings("ignore:ChinchillaBudget. the data end before the budget")
def test_token_weights_add_no_host_wait() -> None:
    from gradient_counter import CountGradientTraffic

    class Silent(TokenModel):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.head(self.embedding(x)).flatten(0, 1).float(), y.flatten())

    module = Silent(fused_adamw)
    counter = CountGradientTraffic(module)
    callbacks = [counter, AccumulationScheduler({0: 2}), ChinchillaBudget(tokens=100_000)]
    plugins = [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))]
    with pytest.warns(UserWarning, match="of 100,000 budgeted tokens"):
        fit(module, token_batches([8] * 12), plugins=plugins, callbacks=callbacks)
    assert [row.host_waits for row in counter.rows[4:-1]] == [0] * 7


def test_sample_and_batch_weights() -> None:
    batches = [[x[:n], y[:n]] for (x, y), n in zip(regression_batches(4), (4, 1, 2, 3), strict=True)]
    for weight_by, shares in (("sample", (4, 1)), ("batch", (1, 1))):
        module = Regression(lambda p: torch.optim.SGD(p, lr=0.0))
        steps = run(module, batches, AccumulationScheduler({0: 2}, weight_by=weight_by))
        losses = [nn.functional.mse_loss(module.net(x), y) for x, y in batches[:2]]
        expected = sum(n * loss for n, loss in zip(shares, losses, strict=True)) / sum(shares)
        reference = torch.autograd.grad(expected, list(module.parameters()))
        for a, b in zip(steps.gradients[0], reference, strict=True):
            torch.testing.assert_close(a, b)


def test_a_count_function_is_used() -> None:
    batches = regression_batches(2)
    module = Regression(lambda p: torch.optim.SGD(p, lr=0.0))
    tokens = iter([3, 1])
    steps = run(module, batches, AccumulationScheduler({0: 2}, count=lambda batch: next(tokens)))
    losses = [nn.functional.mse_loss(module.net(x), y) for x, y in batches]
    reference = torch.autograd.grad((3 * losses[0] + losses[1]) / 4, list(module.parameters()))
    for a, b in zip(steps.gradients[0], reference, strict=True):
        torch.testing.assert_close(a, b)


def test_the_choice_of_weight_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run(TokenModel(), token_batches([4, 4]), AccumulationScheduler({0: 2}))
        run(Regression(), regression_batches(2), AccumulationScheduler({0: 2}))
    for what in ("targets of 11 classes), 4", "MseLoss of 2-d items), "):
        assert f"are weighted by what their losses are means over ({what}" in caplog.text


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_micro_batch_without_loss_is_not_counted() -> None:
    class Sometimes(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
            return None if batch_idx in (1, 3) else super().training_step(batch, batch_idx)

    batches = regression_batches(4)
    module = Sometimes(lambda p: torch.optim.SGD(p, lr=0.0))
    steps = run(module, batches, AccumulationScheduler({0: 4}))
    losses = [nn.functional.mse_loss(module.net(batches[i][0]), batches[i][1]) for i in (0, 2)]
    reference = torch.autograd.grad(sum(losses) / 2, list(module.parameters()))
    for a, b in zip(steps.gradients[0], reference, strict=True):
        torch.testing.assert_close(a, b)


# -- schedules ---------------------------------------------------------------------------------------------------------


def steps_per_epoch(callback: Callback, epochs: int, num_batches: int) -> Counter[int]:
    counted: Counter[int] = Counter()

    class Count(Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            counted[trainer.current_epoch] += 1

    fit(Regression(), regression_batches(num_batches), callback, Count(), max_epochs=epochs)
    return counted


@pytest.mark.parametrize("schedule", [{0: 8, 4: 4}, {2: 3}, {0: 1, 1: 100}], ids=str)
def test_by_epoch_it_is_a_drop_in(schedule: dict[int, int]) -> None:
    ours = steps_per_epoch(AccumulationScheduler(schedule), 6, 20)
    stock = steps_per_epoch(GradientAccumulationScheduler(dict(schedule)), 6, 20)
    assert ours == stock


def test_by_step_changes_inside_an_epoch_drop_and_double_nothing() -> None:
    """D31: changing the number between two batches loses or repeats micro-batches in Lightning."""
    batches = regression_batches(12)
    module = Regression(lambda p: torch.optim.SGD(p, lr=0.0))
    steps = run(module, batches, AccumulationScheduler({0: 1, 1: 3, 2: 2, 4: 5}, unit="step"))
    assert steps.windows == [[0], [1, 2, 3], [4, 5], [6, 7], [8, 9, 10, 11]]
    for window, gradient in zip(steps.windows, steps.gradients, strict=True):
        losses = [nn.functional.mse_loss(module.net(batches[i][0]), batches[i][1]) for i in window]
        reference = torch.autograd.grad(sum(losses) / len(window), list(module.parameters()))
        for a, b in zip(gradient, reference, strict=True):
            torch.testing.assert_close(a, b)


def test_a_second_fit_and_the_callers_dict() -> None:
    """D33."""
    schedule = {2: 2}
    scheduler = AccumulationScheduler(schedule)
    trainer = quiet_trainer(callbacks=[scheduler])
    module = Regression()
    trainer.fit(module, loader(regression_batches(4)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(regression_batches(4)))
    assert schedule == {2: 2}
    assert [batch_idx % trainer.accumulate_grad_batches for batch_idx in range(5)] == [0] * 5
    assert trainer.accumulate_grad_batches == 1
    assert sum(isinstance(callback, AccumulationController) for callback in trainer.callbacks) == 1


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_it_holds_after_a_resume_inside_an_epoch(tmp_path: Any) -> None:
    """D32: Lightning's scheduler is inactive for the rest of that epoch."""
    batches = regression_batches(12)
    straight = Regression(adamw)
    run(straight, batches, AccumulationScheduler({0: 4}))

    class ResumableLoader:
        """Goes on where its state says."""

        def __init__(self) -> None:
            self.position = 0

        def __len__(self) -> int:
            return len(batches)

        def __iter__(self) -> Any:
            start, self.position = self.position % len(batches), self.position % len(batches)
            for batch in batches[start:]:
                self.position += 1
                yield batch

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    first = Regression(adamw)
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="middle")
    fit(first, ResumableLoader(), AccumulationScheduler({0: 4}), checkpoint, enable_checkpointing=True, max_steps=2)
    second = Regression(adamw)
    steps = Steps()
    resumed = quiet_trainer(callbacks=[steps, AccumulationScheduler({0: 4}), checkpoint], enable_checkpointing=True)
    resumed.fit(second, ResumableLoader(), ckpt_path=tmp_path / "middle.ckpt")
    assert steps.windows == [[8, 9, 10, 11]]
    for a, b in zip(weights(second), weights(straight), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("keeps", "hook"), [(False, "on_train_batch_end"), (True, "on_after_backward")])
def test_a_checkpoint_that_loses_a_windows_gradient_warns(keeps: bool, hook: str, tmp_path: Any) -> None:
    """D35: never silently lost; after a backward the gradient holds a part of the micro-batch that is done again."""
    scheduler = AccumulationScheduler({0: 4}, save_partial_gradients=keeps)
    save = at(saving(tmp_path / "inside.ckpt"), hook, call=1 + keeps)
    trainer = quiet_trainer(callbacks=[scheduler, save], limit_train_batches=2)
    with pytest.warns(UserWarning, match="loses the gradient of its first 1 of 4 micro-batches"):
        trainer.fit(Regression(), loader(regression_batches(4)))


def test_a_scheduler_that_joins_in_a_second_fit_sets_its_windows() -> None:
    steps = Steps()
    plugin = AutocastPrecision("bf16-mixed", device="cpu")
    trainer = quiet_trainer(plugins=[plugin], callbacks=[steps], accumulate_grad_batches=4)
    trainer.fit(Regression(), loader(regression_batches(4)))
    trainer.callbacks.append(AccumulationScheduler({0: 2}))
    trainer.accumulate_grad_batches, trainer.fit_loop.max_epochs = 1, 2
    trainer.fit(Regression(), loader(regression_batches(4)))
    assert steps.windows == [[0, 1, 2, 3], [0, 1], [2, 3]]


def test_callback_order_does_not_matter() -> None:
    batches = token_batches([5, 9, 2, 7, 11, 3])
    results = []
    for order in (1, -1):
        module = TokenModel(adamw)
        callbacks = [AccumulationScheduler({0: 2}), ChinchillaBudget(tokens=30)][::order]
        fit(module, batches, callbacks=callbacks, max_epochs=-1)
        results.append(weights(module))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# -- a drop-in for Lightning's scheduler -------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [{4: 2}, {0: 3, 2: 1}, {0: 1}])
def test_it_has_the_names_of_lightnings_scheduler(table: dict[int, int]) -> None:
    stock, ours = GradientAccumulationScheduler(scheduling=dict(table)), AccumulationScheduler(scheduling=table)
    assert ours.scheduling == stock.scheduling
    assert ours.schedule == table
    assert ours.going_to_accumulate_grad_batches() is stock.going_to_accumulate_grad_batches()
    epochs = range(6)
    assert [ours.get_accumulate_grad_batches(epoch) for epoch in epochs] == [
        stock.get_accumulate_grad_batches(epoch) for epoch in epochs
    ]


def test_names_of_lightnings_scheduler_are_answered_for_other_units_too() -> None:
    target = AccumulationScheduler(target_samples=32)
    assert (target.scheduling, target.going_to_accumulate_grad_batches()) == (None, True)
    with pytest.raises(
        ValueError, match="this schedule counts epoch and samples, so the number can change within an epoch"
    ):
        target.get_accumulate_grad_batches(0)
    with pytest.raises(ValueError, match="this schedule counts steps"):
        AccumulationScheduler({0: 2}, unit="step").get_accumulate_grad_batches(0)
    with pytest.raises(ValueError, match="got schedule, scheduling"):
        AccumulationScheduler({0: 2}, scheduling={0: 2})


@pytest.mark.parametrize(("name", "table"), [("optimizer_step", {0: 2}), ("optimizer_zero_grad", {0: 1, 3: 2})])
def test_an_overridden_hook_that_is_called_less_often_is_warned_of(name: str, table: dict[int, int]) -> None:
    overridden: Any = type("Own", (Regression,), {name: lambda self, *a, **k: getattr(Regression, name)(self, *a, **k)})
    with pytest.warns(UserWarning, match=rf"Own\.{name} will be called once per optimizer step"):
        run(overridden(sgd), regression_batches(4), AccumulationScheduler(table))
    run(overridden(sgd), regression_batches(4), AccumulationScheduler({0: 1}))
