"""MicroBatchOnOOM on one process: the gradient of the whole micro-batch, whatever had to be split."""

import dataclasses
import gc
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from planted_oom import Limited, microbatched_loop, out_of_memory
from small_models import TokenModel, fit, loader, quiet_trainer, regression_batches, token_batches, weights
from torch import nn
from torchmetrics import MeanMetric

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler, OverflowMonitor
from lightning_mp.callbacks.micro_batch_on_oom import MicroBatchOnOOM
from lightning_mp.training.accumulation.out_of_memory import forget_attempt


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: Any, b: Any, rtol: float) -> bool:
    return all(torch.allclose(x, y, rtol=rtol, atol=rtol) for x, y in zip(a, b, strict=True))


def precision(name: str) -> dict[str, Any]:
    if name == "16-stock":
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))]}
    if name == "bf16-stock":
        return {"plugins": [MixedPrecision("bf16-mixed", "cpu")]}
    if name == "16-ours":
        return {"plugins": [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10))]}
    return {}


# -- the gradient ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("kind", ["32", "16-stock", "bf16-stock", "16-ours"])
def test_what_fits_is_bit_equal_to_stock(kind, window):
    """Also where the loss is divided by 3, and with random numbers."""
    runs = []
    for callbacks in ([], [MicroBatchOnOOM()]):
        model = Limited(dropout=0.2)
        torch.manual_seed(5)
        fit(model, regression_batches(6), *callbacks, accumulate_grad_batches=window, **precision(kind))
        runs.append(model)
    assert all(equal(a, b) for a, b in zip(runs[0].gradients, runs[1].gradients, strict=True))
    assert equal(weights(runs[0]), weights(runs[1]))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(("limit", "parts"), [(4, [4, 4]), (2, [2, 2, 2, 2])])
def test_split_run_is_bit_equal_to_a_plain_loop_with_these_parts(where, window, first, limit, parts):
    """Halved once or twice, at the first micro-batch or in a window, whose earlier ones are split as well."""
    batches = regression_batches(6, batch_size=8)
    dropout = 0.0 if first else 0.3
    model = Limited(limit, where, first=first, dropout=dropout)
    callback = MicroBatchOnOOM()
    fit(model, batches, callback, accumulate_grad_batches=window)
    reference = Limited(dropout=dropout)
    torch.set_rng_state(model.random_state)
    whole = first - first % window
    expected = microbatched_loop(reference, batches, [[8]] * whole + [parts] * (6 - whole), window)
    assert callback.size == limit
    assert all(equal(a, b) for a, b in zip(model.gradients, expected, strict=True))
    assert equal(weights(model), weights(reference))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("limit", [3, 1])
def test_gradient_is_that_of_the_whole(dtype, rtol, limit):
    batches = [[t.to(dtype) for t in batch] for batch in regression_batches(4, batch_size=7)]
    model, whole = Limited(limit, "backward", dtype=dtype), Limited(dtype=dtype)
    fit(model, batches, MicroBatchOnOOM(), accumulate_grad_batches=2)
    fit(whole, batches, accumulate_grad_batches=2)
    assert all(close(a, b, rtol) for a, b in zip(model.gradients, whole.gradients, strict=True))


@pytest.mark.parametrize("kind", ["16-stock", "bf16-stock", "16-ours"])
def test_gradient_under_mixed_precision(kind):
    """Loss scaling included: within the rounding of the 16-bit forward."""
    batches = regression_batches(4, batch_size=8)
    model, whole = Limited(2, "backward"), Limited()
    fit(model, batches, MicroBatchOnOOM(), accumulate_grad_batches=2, **precision(kind))
    fit(whole, batches, accumulate_grad_batches=2, **precision(kind))
    tolerance = 4e-2 if kind == "bf16-stock" else 4e-3
    assert all(close(a, b, tolerance) for a, b in zip(model.gradients, whole.gradients, strict=True))


class Tokens(TokenModel):
    """Refuses more than ``limit`` rows, and an empty mean."""

    limit = 10**9

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) > self.limit and torch.is_grad_enabled():
            out_of_memory()
        logits = self.head(self.embedding(batch[0]))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("tokens_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = [*getattr(self, "gradients", []), [p.grad.clone() for p in self.parameters()]]


def ragged(lengths: list[int]) -> list[Any]:
    """Rows of very different numbers of tokens; some have none."""
    batches = token_batches(lengths, batch_size=4)
    for _, y in batches:
        y[1] = -100
        y[0, : y.shape[1] // 2] = -100
    return batches


@pytest.mark.parametrize("limit", [2, 1])
def test_ragged_tokens_weigh_what_they_are(limit):
    """By target tokens; a part without any, 0 / 0, has no share in the gradient nor in what is logged."""
    batches = ragged([9, 30, 14, 21])
    model, whole = Tokens().double(), Tokens().double()
    model.limit = limit
    trainers = [fit(model, batches, MicroBatchOnOOM()), fit(whole, batches)]
    assert all(close(a, b, 1e-14) for a, b in zip(model.gradients, whole.gradients, strict=True))
    for name in ("tokens_loss_step", "tokens_loss_epoch"):
        logged = [trainer.callback_metrics[name] for trainer in trainers]
        torch.testing.assert_close(*logged, rtol=1e-6, atol=0)


def test_a_micro_batch_without_any_token_is_what_it_is_without_the_callback():
    batches = ragged([9, 30])
    batches[1][1].fill_(-100)
    model = TokenModel()
    callback = MicroBatchOnOOM()
    callback.size = 2
    fit(model, batches, callback)
    whole = TokenModel()
    fit(whole, batches)
    assert all(close(a, b, 1e-6) for a, b in zip(weights(model), weights(whole), strict=True))


@pytest.mark.parametrize("plugin", ["32", "16-ours", "16-stock"])
def test_schedule_and_budget_see_one_micro_batch(plugin):
    """Tokens are counted once, failed attempts not at all; the run ends on its budget, to the token."""
    batches = ragged([9, 30, 14, 21, 17, 26])
    input_tokens = sum(int((y != -100).sum()) for _, y in batches)
    runs = []
    for limit in (10**9, 1):
        model = Tokens()
        model.limit = limit
        budget = ChinchillaBudget(tokens=input_tokens - 5)
        callbacks = [MicroBatchOnOOM(), AccumulationScheduler({0: 2, 1: 3}, unit="step"), budget]
        fit(model, batches, *callbacks, max_epochs=-1, **precision(plugin))
        assert budget.tokens_seen == input_tokens - 5
        assert callbacks[0].size == (1 if limit == 1 else None)
        runs.append(model)
    tolerance = 1e-6 if plugin == "32" else 4e-3
    assert len(runs[0].gradients) == len(runs[1].gradients) == 3
    assert all(close(a, b, tolerance) for a, b in zip(runs[0].gradients, runs[1].gradients, strict=True))


@pytest.mark.parametrize("kind", ["16-stock", "16-ours"])
def test_an_overflow_in_one_chunk_skips_the_step(kind):
    batches = regression_batches(3, batch_size=8)
    batches[1][0][5] = torch.inf
    model = Limited(2)
    before = []
    monitor = OverflowMonitor()
    callback = MicroBatchOnOOM()
    trainer = fit(model, batches[:1], callback, **precision(kind))
    before = weights(model)
    trainer = fit(model, batches[1:2], callback, monitor, **precision(kind))
    assert equal(weights(model), before)
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**9


# -- what else a step does ---------------------------------------------------------------------------------------------


class Outputs(pl.Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.hooks: list[str] = []

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self.hooks.append(f"before {loss.item():.6f}")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.hooks.append("after")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)


def test_outputs_logs_and_hooks_are_those_of_one_micro_batch():
    """But ``on_before_backward``, which sees the loss of each part, and may multiply it."""
    batches = regression_batches(3, batch_size=8)
    seen = []
    for limit in (10**9, 3):
        outputs = Outputs()
        trainer = fit(Limited(limit, "backward", first=1), batches, MicroBatchOnOOM(), outputs)
        seen.append((outputs, dict(trainer.callback_metrics)))
    (whole, whole_logs), (split, split_logs) = seen
    assert [hook.split()[0] for hook in whole.hooks] == ["before", "after"] * 3
    parts = ["before"] * 4 + ["after"]
    # One micro-batch failed in its backward before it was split, and once again at half of its size.
    assert [hook.split()[0] for hook in split.hooks] == ["before", "after", "before", "before", *parts, *parts]
    assert whole_logs.keys() == split_logs.keys() == {"loss", "loss_step", "loss_epoch"}
    for name, value in whole_logs.items():
        torch.testing.assert_close(split_logs[name], value, rtol=1e-6, atol=0)
    for a, b, batch in zip(split.outputs, whole.outputs, batches, strict=True):
        assert torch.equal(a["rows"], batch[0][:, 0])
        for key in ("loss", "double"):
            torch.testing.assert_close(a[key], b[key], rtol=1e-6, atol=0)


def test_a_failed_attempt_leaves_nothing_behind():
    """Counters, running statistics and the random state; only what ran in the end counts."""

    class Normed(Limited):
        def __init__(self) -> None:
            super().__init__(4, "backward")
            self.net[2] = nn.BatchNorm1d(16)

    model = Normed()
    batches = regression_batches(2, batch_size=8)
    with pytest.warns(UserWarning, match=r"1 layers \(net.2\) normalise over the samples of a batch"):
        fit(model, batches, MicroBatchOnOOM())
    assert model.steps == 4
    assert int(model.net[2].num_batches_tracked) == 4
    # The attempt that failed; four samples and their halves, whose losses were compared, twice.
    assert [rows for _, rows in model.notes.rows] == [8, *2 * [2, 2, 2, 4], 4, 4, 4, 4]


class Box:
    """Holds a tensor that autograd saved, for as long as its graph does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_that_was_saved_for_backward_is_left_when_the_next_attempt_begins(where):
    boxes: list[Any] = []
    left: list[int] = []

    def pack(tensor: torch.Tensor) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    class Boxed(Limited):
        def training_step(self, batch, batch_idx):
            left.append(sum(box() is not None for box in boxes))
            # An error may hold itself alive through its own frames.
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
                try:
                    return super().training_step(batch, batch_idx)
                except torch.OutOfMemoryError as error:
                    kept.append(error)
                    raise

    fit(Boxed(2, where), regression_batches(2, batch_size=8), MicroBatchOnOOM())
    assert left == [0] * len(left)
    assert len(left) > 2 + 4 + 4
    assert len(boxes) > 10


def test_no_graph_of_a_microbatch_is_left_when_the_next_one_begins():
    """Not by what was logged or returned either."""
    kept = []
    gc.collect()

    class Counts(Limited):
        def training_step(self, batch, batch_idx):
            tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
            kept.append(sum(tensor.grad_fn is not None for tensor in tensors))
            return super().training_step(batch, batch_idx)

    callback = MicroBatchOnOOM()
    callback.load_state_dict({"size": 2, "form": None})
    fit(Counts(), regression_batches(1, batch_size=8), callback)
    assert kept == [kept[0]] * len(kept)
    assert len(kept) > 4


@pytest.mark.parametrize("chained", [True, False], ids=["cause", "context"])
def test_what_a_wrapped_error_came_through_is_let_go_too(chained):
    held = []

    def fails():
        activations = nn.Identity()
        held.append(weakref.ref(activations))
        out_of_memory()

    def wraps():
        try:
            fails()
        except torch.OutOfMemoryError as error:
            if chained:
                raise RuntimeError("out of memory in block 3") from error
            raise RuntimeError("out of memory in block 3")  # noqa: B904

    with pytest.raises(RuntimeError) as caught:
        wraps()
    assert held[0]() is not None
    forget_attempt(caught.value)
    assert held[0]() is None


def test_validation_may_call_the_training_step():
    class Shared(Limited):
        def validation_step(self, batch, batch_idx):
            return self.training_step(batch, batch_idx)

    trainer = quiet_trainer(callbacks=[MicroBatchOnOOM()])
    batches = loader(regression_batches(2, batch_size=8))
    trainer.fit(Shared(4, "forward", first=0), batches, loader(regression_batches(1)))
    assert trainer.state.finished


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")
def test_a_mean_over_microbatches_is_one_over_those_that_returned_something():
    seen = []

    class Some(Limited):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)["loss"]
            return None if len(self.notes.rows) == 2 else {"loss": loss, "accuracy": 1.0}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(outputs["accuracy"])

    callback = MicroBatchOnOOM()
    callback.load_state_dict({"size": 2, "form": None})
    fit(Some(), regression_batches(1, batch_size=8), callback)
    assert seen == pytest.approx([1.0])


def test_a_step_without_loss_is_left_out_of_the_mean_of_its_window():
    class Sometimes(Limited):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    runs = []
    for limit in (10**9, 2):
        model = Sometimes(limit)
        with warnings.catch_warnings():
            # Lightning says so once per process.
            warnings.filterwarnings("ignore", ".*returned `None`")
            fit(model, regression_batches(4), MicroBatchOnOOM(), accumulate_grad_batches=2)
        runs.append(model.gradients)
    alone = Limited()
    fit(alone, regression_batches(1))
    assert all(close(a, b, 1e-6) for a, b in zip(*runs, strict=True))
    assert close(runs[0][0], alone.gradients[0], 1e-6)


@pytest.mark.parametrize(
    ("output", "message"), [({"los": 1.0}, "the 'loss' key needs to be"), ("loss", "must return a Tensor")]
)
def test_a_wrong_output_gets_lightnings_own_message(output, message):
    class Wrong(Limited):
        def training_step(self, batch, batch_idx):
            return output

    with pytest.raises(MisconfigurationException, match=message):
        fit(Wrong(), regression_batches(1), MicroBatchOnOOM())


def test_everything_is_put_back_after_fit_and_after_an_error():
    model = Limited(4)
    fit(model, regression_batches(1, batch_size=8), MicroBatchOnOOM())
    model = Limited(0)
    trainer = quiet_trainer(callbacks=[MicroBatchOnOOM()])
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(model, loader(regression_batches(1, batch_size=8)))
    loop = trainer.fit_loop.epoch_loop
    changed = vars(loop.automatic_optimization) | vars(loop._results) | vars(trainer.precision_plugin)
    assert {"_make_closure", "log", "post_backward"}.isdisjoint(changed)


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_the_size_is_kept_and_resumed(tmp_path):
    """No second failure after a resume."""
    batches = regression_batches(3, batch_size=8)
    callback = MicroBatchOnOOM()
    model = Limited(3, "backward")
    trainer = fit(model, batches, callback)
    assert callback.size == 2
    # After the first failure the losses of some samples and of their halves are compared.
    assert [rows for _, rows in model.notes.rows] == [8, *2 * [2, 2, 2, 4], 4, *12 * [2]]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again, resumed = Limited(3, "backward"), MicroBatchOnOOM()
    trainer = quiet_trainer(callbacks=[resumed], max_epochs=2)
    trainer.fit(again, loader(batches), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert resumed.size == 2
    assert [rows for _, rows in again.notes.rows] == [2] * 12


def test_a_comparison_of_losses_leaves_nothing_behind():
    """Where it is the only thing that runs beside the parts: of a size that is set by hand."""
    runs = []
    for form in (None, "mean"):
        callback, model = MicroBatchOnOOM(), Limited(dropout=0.2)
        callback.load_state_dict({"size": 4, "form": form})
        torch.manual_seed(5)
        fit(model, regression_batches(2, batch_size=8), callback)
        assert model.steps == 4
        runs.append(weights(model))
    assert equal(*runs)


def test_a_resumed_size_is_not_below_min_size():
    callback = MicroBatchOnOOM(min_size=3)
    callback.load_state_dict({"size": 2, "form": None})
    assert callback.size == 3


@pytest.mark.parametrize(("min_size", "tried"), [(1, "8, 4, 2, 1"), (3, "8, 4, 3"), (8, "8")])
def test_at_min_size_the_original_error_says_what_was_tried(min_size, tried):
    with pytest.raises(torch.OutOfMemoryError, match="planted") as caught:
        fit(Limited(0, "backward"), regression_batches(1, batch_size=8), MicroBatchOnOOM(min_size=min_size))
    [note] = caught.value.__notes__
    assert f"with at most {tried} samples at a time" in note
    assert f"min_size={min_size} allows no fewer" in note
    assert "ActivationCheckpointing" in note
    assert any(frame.name == "out_of_memory" for frame in caught.traceback)


def test_other_errors_pass_through():
    class Broken(Limited):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("shapes do not match")

    model = Broken()
    with pytest.raises(RuntimeError, match="shapes do not match"):
        fit(model, regression_batches(1), MicroBatchOnOOM())


# -- batches -----------------------------------------------------------------------------------------------------------


class Bag:
    """A batch of a user's own."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


def split_bag(bag: Bag, size: int) -> list[Bag]:
    return [Bag(x, y) for x, y in zip(bag.x.split(size), bag.y.split(size), strict=True)]


class Bagged(Limited):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch.x, batch.y), batch_idx)["loss"]


def test_a_users_split():
    bags = [Bag(*batch) for batch in regression_batches(3, batch_size=7)]

    model, whole = Bagged(3), Limited()
    model.log = lambda *args, **kwargs: None  # Lightning cannot find the batch size of a Bag
    fit(model, bags, MicroBatchOnOOM(split=split_bag))
    fit(whole, regression_batches(3, batch_size=7))
    assert all(close(a, b, 1e-6) for a, b in zip(model.gradients, whole.gradients, strict=True))
    assert [rows for _, rows in model.notes.rows][-8:] == 2 * [2, 2, 2, 1]


@dataclasses.dataclass
class Fields:
    """A batch whose tensors are in a dict in a field."""

    tensors: dict[str, torch.Tensor]


class Writes(Limited):
    """Writes to its batch what comes of it, as an augmentation does."""

    def training_step(self, batch, batch_idx):
        holder = batch.tensors if isinstance(batch, Fields) else vars(batch) if isinstance(batch, Bag) else batch
        holder["x"] = 2 * holder["x"] + 1
        holder["middle"] = holder["x"].mean()
        loss = super().training_step((holder["x"], holder["y"]), batch_idx)["loss"]
        holder["loss"] = float(loss.detach())
        return loss

    def log(self, *args, **kwargs):
        """Lightning cannot find the batch size of a Bag."""


@pytest.mark.parametrize(
    ("make", "split"),
    [(dict, None), (lambda x, y: Fields({"x": x, "y": y}), None), (Bag, split_bag)],
    ids=["dict", "dict in a dataclass", "object"],
)
def test_a_step_may_write_to_what_holds_its_tensors(make, split):
    """Parts, and micro-batches that are computed again, begin with what the loader gave."""
    runs = []
    for limit in (10**9, 3):
        batches = [make(x=x, y=y) for x, y in regression_batches(4, batch_size=8)]
        model = Writes(limit, "backward", first=1)
        fit(model, batches, MicroBatchOnOOM(split=split), accumulate_grad_batches=2)
        runs.append(model.gradients)
    assert all(close(a, b, 1e-6) for a, b in zip(*runs, strict=True))


def test_hooks_read_what_a_step_has_written_into_a_batch_that_fits():
    seen = []

    class Reads(Writes):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(batch["loss"])

    fit(Reads(), [{"x": x, "y": y} for x, y in regression_batches(2, batch_size=8)], MicroBatchOnOOM())
    assert len(seen) == 2


def test_a_batch_that_cannot_be_split_is_refused_at_once():
    bags = [Bag(*batch) for batch in regression_batches(1)]
    with pytest.raises(MisconfigurationException, match=r"batch is of type 'Bag'\. Pass MicroBatchOnOOM\(split="):
        fit(Bagged(), bags, MicroBatchOnOOM())


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_size", [0, -1, 1.5, True, "two", None])
def test_min_size_must_be_a_whole_number(min_size):
    with pytest.raises(ValueError, match="a whole number of samples, 1 or more"):
        MicroBatchOnOOM(min_size=min_size)


def test_split_must_be_a_function():
    with pytest.raises(ValueError, match="split='halves'.* must be a function"):
        MicroBatchOnOOM(split="halves")


def start(model: pl.LightningModule, strategy: Any, ranks: int = 1) -> None:
    """Up to the refusals of a fit."""
    trainer = SimpleNamespace(world_size=ranks, strategy=strategy, optimizers=[])
    MicroBatchOnOOM().on_fit_start(trainer, model)


@pytest.mark.parametrize("kind", [pl.strategies.FSDPStrategy, pl.strategies.ModelParallelStrategy])
def test_sharded_strategies_are_refused_with_the_reason(kind):
    with pytest.raises(MisconfigurationException, match="repeats a forward alone would wait for the others forever"):
        start(Limited(), kind())


def test_manual_optimization_is_refused():
    model = Limited()
    model.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="automatic_optimization=False, as the module runs its own"):
        fit(model, regression_batches(1), MicroBatchOnOOM())


class EvaluatesTwice(torch.optim.SGD):
    """As SAM does."""

    def step(self, closure):
        closure()
        return super().step(closure)


def test_lbfgs_is_refused():
    with pytest.raises(MisconfigurationException, match="LBFGS, which evaluates the loss several times"):
        fit(Limited(make_optimizer=torch.optim.LBFGS), regression_batches(1), MicroBatchOnOOM())


def test_a_loss_that_is_evaluated_again_inside_of_a_step_is_not_split():
    """An optimizer may do so without having to have a closure: this is seen when it does."""
    batches = regression_batches(2, batch_size=8)
    fit(Limited(make_optimizer=lambda p: EvaluatesTwice(p, lr=0.1)), batches, MicroBatchOnOOM())
    with pytest.raises(MisconfigurationException, match="evaluated again inside of a step, as EvaluatesTwice does"):
        fit(Limited(4, make_optimizer=lambda p: EvaluatesTwice(p, lr=0.1)), batches, MicroBatchOnOOM())


class Follows(Limited):
    """Updates a frozen target network in its step."""

    def __init__(self, update: Any) -> None:
        super().__init__(4)
        self.target = nn.Linear(1, 1).requires_grad_(False)
        self.update = update

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.update(self.target.weight)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "update",
    [lambda weight: weight.mul_(0.9), lambda weight: setattr(weight, "data", 0.9 * weight)],
    ids=["in place", "data"],
)
def test_a_target_network_that_the_step_updates_is_refused(update):
    """It would be updated for each part, and was in the attempt that failed."""
    model = Follows(update)
    with pytest.raises(
        MisconfigurationException, match=r"changes frozen parameters \(target\.weight\).*on_train_batch_end"
    ):
        fit(model, regression_batches(1, batch_size=8), MicroBatchOnOOM())
    assert not model.gradients


def test_a_step_that_fetches_its_batches_is_refused():
    class Fetching(Limited):
        def training_step(self, dataloader_iter):
            raise AssertionError

    with pytest.raises(MisconfigurationException, match="takes the batch out of the loader"):
        start(Fetching(), pl.strategies.SingleDeviceStrategy())


def test_hooks_after_accumulation_are_refused():
    model = Limited()
    model.net[0].weight.register_post_accumulate_grad_hook(lambda value: None)
    with pytest.raises(MisconfigurationException, match=r"hook \(net.0.weight\): such a hook would run on"):
        fit(model, regression_batches(1), MicroBatchOnOOM())


def hooked() -> Limited:
    model = Limited()
    model.net[0].weight.register_hook(lambda gradient: gradient / 2)
    return model


def synced() -> Limited:
    model = Limited()
    model.net[2] = nn.SyncBatchNorm(16)
    return model


def gathering() -> Limited:
    model = Limited()
    model.mean = MeanMetric(dist_sync_on_step=True)
    return model


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (hooked, r"gradient hooks on parameters \(net\.0\.weight\) on several ranks"),
        (synced, r"on several ranks \(net\.2\): a rank that repeats"),
        (gathering, r"dist_sync_on_step=True on several ranks \(mean\)"),
    ],
)
def test_what_several_ranks_cannot_have(make_model, message):
    with pytest.raises(MisconfigurationException, match=message):
        start(make_model(), pl.strategies.DDPStrategy(), ranks=2)


def test_gradient_hooks_run_for_each_part_on_one_rank():
    runs = []
    for limit in (10**9, 3):
        model = hooked()
        model.limit = limit
        fit(model, regression_batches(3, batch_size=8), MicroBatchOnOOM())
        runs.append(model.gradients)
    assert all(close(a, b, 1e-6) for a, b in zip(*runs, strict=True))
