"""MicroBatchOnOOM with Hugging Face models, other precisions, recomputation, metrics, and its costs."""

import warnings
from typing import Any

import pytest
import torch
from gradient_counter import CountGradientTraffic
from huggingface_models import LanguageModel, collated_by_transformers, gpt2, sgd
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from planted_oom import Limited, out_of_memory
from small_models import adamw, fit, fused_adamw, loader, quiet_trainer, regression_batches, weights
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from transformers import BatchEncoding

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    ExactResume,
    GradientNoiseScale,
    LossScaler,
    MasterWeightsPrecision,
    MFUMonitor,
)
from lightning_mp.callbacks.micro_batch_on_oom import MicroBatchOnOOM
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.accumulation.out_of_memory import is_out_of_memory
from lightning_mp.training.accumulation.part_results import merge_logged


def assert_close(a: Any, b: Any, rtol: float) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol)


# -- Hugging Face ------------------------------------------------------------------------------------------------------


class LimitedLanguageModel(LanguageModel):
    limit = 10**9

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch["input_ids"]) > self.limit and torch.is_grad_enabled():
            out_of_memory()
        return super().training_step(batch, batch_idx)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("schedule", [False, True])
def test_gpt2_on_batch_encodings_of_ragged_texts(schedule):
    """Labels that the model shifts itself: the first of each row bears no loss and does not count."""
    torch.manual_seed(0)
    start = gpt2().double().state_dict()
    runs = []
    for limit in (10**9, 1):
        model = LimitedLanguageModel(gpt2().double(), sgd)
        model.model.load_state_dict(start)
        model.limit = limit
        callbacks = [MicroBatchOnOOM()] + [AccumulationScheduler({0: 4}, weight_by="token")] * schedule
        trainer = fit(model, collated_by_transformers(), *callbacks)
        runs.append((model, trainer.callback_metrics["train_loss"]))
    (whole, whole_loss), (split, split_loss) = runs
    assert split.batch_types == {BatchEncoding}
    assert len(split.losses) == 3 * len(whole.losses)
    assert split.loss_bearing_tokens == whole.loss_bearing_tokens
    assert len(split.gradients) == (3 if schedule else 12)
    for a, b in zip(split.gradients, whole.gradients, strict=True):
        # The model computes its loss in fp32.
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(split_loss, whole_loss, rtol=1e-6, atol=0)


def test_num_items_in_batch_is_not_divided_twice():
    """A loss that is a sum over a number in the batch adds up over microbatches."""

    class Declared(Limited):
        def training_step(self, batch, batch_idx):
            if len(batch["x"]) > self.limit:
                out_of_memory()
            return (self.net(batch["x"]) - batch["y"]).square().sum() / batch["num_items_in_batch"]

    batches = [{"x": x, "y": y, "num_items_in_batch": 24} for x, y in regression_batches(3, batch_size=8)]
    model, whole = Declared(3), Declared()
    fit(model, loader(batches), MicroBatchOnOOM())
    fit(whole, loader(batches))
    assert_close(weights(model), weights(whole), 1e-6)


# -- precision ---------------------------------------------------------------------------------------------------------


class CastingInput(Limited):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x.to(self.net[0].weight.dtype), y), batch_idx)


@pytest.mark.parametrize(
    ("make_plugin", "rtol"),
    [
        (DoublePrecision, 1e-13),
        (lambda: HalfPrecision("bf16-true"), 4e-2),
        (lambda: MasterWeightsPrecision("bf16-true"), 4e-2),
        (lambda: MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=2.0**10)), 8e-3),
        (lambda: AutocastPrecision("bf16-mixed"), 4e-2),
    ],
    ids=["64-true", "bf16-true stock", "bf16-true", "16-true", "bf16-mixed"],
)
def test_every_precision(make_plugin, rtol):
    runs = []
    for limit in (10**9, 2):
        model = CastingInput(limit, "backward")
        callback = MicroBatchOnOOM()
        batches = loader(regression_batches(4, batch_size=8))
        fit(model, batches, callback, plugins=[make_plugin()], accumulate_grad_batches=2)
        assert callback.size == (None if limit > 8 else 2)
        runs.append([[g.double() for g in step] for step in model.gradients])
    for a, b in zip(*runs, strict=True):
        assert_close(a, b, rtol)


def test_backward_runs_outside_of_autocast_under_a_stock_plugin():
    """An fp32 region stays fp32 in its backward."""
    seen: list[Any] = []

    class Watched(Limited):
        def backward(self, loss):
            seen.append(torch.is_autocast_enabled("cpu"))
            loss.backward()

    model = Watched(4)
    fit(model, loader(regression_batches(1, batch_size=8)), MicroBatchOnOOM(), precision="bf16-mixed")
    assert seen == [False] * 2


# -- recomputation and compilation -------------------------------------------------------------------------------------


class Checkpointed(Limited):
    use_reentrant = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        if len(x) > self.limit:
            out_of_memory()
        hidden = checkpoint(self.net[:3], x.requires_grad_(), use_reentrant=self.use_reentrant)
        return nn.functional.mse_loss(self.net[3](hidden), y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints(use_reentrant):
    """The reentrant kind too, which does not work with torch.autograd.grad."""
    runs = []
    for limit in (10**9, 3):
        model = Checkpointed(limit, dropout=0.0)
        model.use_reentrant = use_reentrant
        fit(model, loader(regression_batches(3, batch_size=8)), MicroBatchOnOOM())
        runs.append(model.gradients)
    for a, b in zip(*runs, strict=True):
        assert_close(a, b, 1e-5)


# -- what else ---------------------------------------------------------------------------------------------------------


def test_a_metric_counts_every_sample_once():
    class Measured(Limited):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mean = MeanMetric()

        def training_step(self, batch, batch_idx):
            self.mean.update(batch[0])
            output = super().training_step(batch, batch_idx)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return output

    batches = regression_batches(3, batch_size=8)
    trainer = fit(Measured(2, "backward"), loader(batches), MicroBatchOnOOM())
    expected = torch.cat([x for x, _ in batches]).mean()
    torch.testing.assert_close(trainer.callback_metrics["mean"], expected)


def test_a_metric_that_is_logged_for_a_step_has_the_value_of_the_whole_batch():
    """By itself, in a collection, and as a value."""

    class Measured(Limited):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mean = MeanMetric()
            self.several = MetricCollection({"first": MeanMetric(), "second": MeanMetric()})

        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            self.mean(batch[0][:, 0])
            self.several(batch[0][:, 1])
            self.log("mean", self.mean, on_step=True, on_epoch=True)
            self.log_dict(self.several, on_step=True, on_epoch=True)
            self.log("rounded", output["loss"].item(), on_step=True, on_epoch=True)
            return output

    batches = regression_batches(3, batch_size=7)
    whole, split = (fit(Measured(limit), loader(batches), MicroBatchOnOOM()) for limit in (10**9, 3))
    assert {"mean_step", "mean_epoch", "first_step", "second_epoch"} <= whole.callback_metrics.keys()
    for name, value in whole.callback_metrics.items():
        torch.testing.assert_close(split.callback_metrics[name], value, rtol=1e-5, atol=0, msg=name)


def test_values_of_a_part_that_counts_nothing_are_left_out_of_what_is_logged():
    """Also where they are not the loss, and a ``batch_size=`` is given; a sum's loss is the sum also as a float."""

    class Half(Limited):
        def training_step(self, batch, batch_idx):
            x, y = batch
            if len(x) > self.limit and torch.is_grad_enabled():
                out_of_memory()
            chosen = self.net(x)[x[:, 0] > 0]
            loss = (chosen - y[x[:, 0] > 0]).square().mean()
            self.log("half", loss / 2, on_step=True, on_epoch=True, batch_size=len(x))
            self.log("rows", x[:, 1].mean(), on_step=True, on_epoch=True, batch_size=len(x))
            return loss

    batches = regression_batches(1, batch_size=8)
    batches[0][0][:, 0] = torch.tensor([1.0, -1, 1, 1, 1, 1, -1, -1])
    whole, split = (fit(Half(limit), loader(batches), MicroBatchOnOOM()) for limit in (10**9, 2))
    assert split.callback_metrics["half_epoch"].isfinite()
    torch.testing.assert_close(split.callback_metrics["rows_step"], whole.callback_metrics["rows_step"])
    assert whole.callback_metrics["half_epoch"] > 0

    class Summed(Limited):
        def training_step(self, batch, batch_idx):
            loss = 8 * len(batch[0]) * super().training_step(batch, batch_idx)["loss"]
            self.log("sum", loss.item())
            return loss

    whole, split = (fit(Summed(limit), loader(batches), MicroBatchOnOOM()) for limit in (10**9, 2))
    torch.testing.assert_close(split.callback_metrics["sum"], whole.callback_metrics["sum"])


@pytest.mark.parametrize("window", [1, 2])
def test_parts_are_weighted_beside_a_monitor_that_only_counts(window):
    """It has the controller settle before this callback that nothing is weighted."""
    runs = []
    for limit in (10**9, 3):
        model = Limited(limit)
        monitor = MFUMonitor(unit="sample", peak_flops=1e12)
        fit(model, loader(regression_batches(4, 8)), monitor, MicroBatchOnOOM(), accumulate_grad_batches=window)
        runs.append(model.gradients)
    for a, b in zip(*runs, strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.filterwarnings("ignore:You called .self.log.*needs to be floating")
def test_whole_numbers_are_logged_and_a_constant_batch_size_is_that_of_the_whole():
    """Of the batches the last two are split: a size that counts four times would give them more weight."""

    class Counts(Limited):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            self.log("many", (batch[1] > 0).sum(), reduce_fx="sum", on_step=True, on_epoch=True)
            self.log("float", output["loss"].item(), on_epoch=True)
            self.log("first", batch[0][:, 0].mean(), on_step=False, on_epoch=True, batch_size=8)
            return output

    batches = [[t.double() for t in batch] for batch in regression_batches(4, 8)]
    trainer = fit(Counts(2, first=2, dtype=torch.float64), loader(batches), MicroBatchOnOOM())
    torch.testing.assert_close(trainer.callback_metrics["float"], trainer.callback_metrics["loss_epoch"].float())
    assert trainer.callback_metrics["many_epoch"] == sum((y > 0).sum() for _, y in batches)
    assert trainer.callback_metrics["many_step"] == (batches[-1][1] > 0).sum()
    expected = torch.cat([x for x, _ in batches])[:, 0].mean()
    torch.testing.assert_close(trainer.callback_metrics["first"], expected, check_dtype=False)


def test_a_batch_size_that_is_given_weighs_the_epoch_mean():
    class Logging(Limited):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            self.log("first", batch[0][:, 0].mean(), False, on_step=False, on_epoch=True, batch_size=len(batch[0]))
            return output

    batches = [[t[:rows] for t in batch] for batch, rows in zip(regression_batches(3, 8), (8, 5, 2), strict=True)]
    trainer = fit(Logging(3), loader(batches), MicroBatchOnOOM())
    expected = torch.cat([x for x, _ in batches])[:, 0].mean()
    torch.testing.assert_close(trainer.callback_metrics["first"], expected)


def test_a_healthy_step_waits_no_more_than_without_and_passes_no_more_after_backward():
    rows = []
    for callbacks in ([], [MicroBatchOnOOM()]):
        model = Limited(make_optimizer=fused_adamw)
        model.log = lambda *args, **kwargs: None
        model.on_before_optimizer_step = lambda optimizer: None
        counter = CountGradientTraffic(model)
        plugin = AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10))
        fit(model, loader(regression_batches(6)), counter, *callbacks, plugins=[plugin])
        rows.append([(row.host_waits, row.passes) for row in counter.rows[1:]])
    assert rows[0] == rows[1]


def test_cast_weights_do_not_outlive_their_microbatch():
    """As in stock, where autocast has been left before the backward: each microbatch casts the weights once."""
    casts = []
    for size in (None, 4, 2):
        model, callback = Limited(), MicroBatchOnOOM()
        callback.size = size
        counter = CountGradientTraffic(model)
        fit(model, loader(regression_batches(3, 8)), counter, callback, plugins=[AutocastPrecision("bf16-mixed")])
        casts.append(counter.rows[1].weight_casts)
    assert casts[0] > 0
    assert casts == [casts[0], 2 * casts[0], 4 * casts[0]]


def test_a_value_that_is_logged_twice_keeps_its_order():
    class Twice(Limited):
        def training_step(self, batch, batch_idx):
            for value in (1.0, 3.0):
                self.log("twice", value, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = fit(Twice(2), loader(regression_batches(2, 8)), MicroBatchOnOOM())
    assert trainer.callback_metrics["twice_step"] == 3.0
    assert trainer.callback_metrics["twice_epoch"] == 2.0


def test_a_compiled_network_is_compiled_again_for_a_new_size_only():
    shapes: list[int] = []

    def backend(graph, inputs):
        shapes.append(1)
        return graph.forward

    class Compiled(Limited):
        def training_step(self, batch, batch_idx):
            x, y = batch
            if len(x) > self.limit:
                out_of_memory()
            return nn.functional.mse_loss(network(x), y)

    torch.compiler.reset()
    model, whole = Compiled(4), Limited()
    network = torch.compile(model.net, backend=backend, dynamic=False)
    fit(model, loader(regression_batches(6, 8)), MicroBatchOnOOM())
    fit(whole, loader(regression_batches(6, 8)))
    # Four samples, and two and four in eval mode, whose losses were compared.
    assert len(shapes) == 3
    assert_close(weights(model), weights(whole), 1e-5)


def test_sparse_gradients():
    class Sparse(Limited):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.embedding = nn.Embedding(11, 1, sparse=True)

        def training_step(self, batch, batch_idx):
            x, y = batch
            if len(x) > self.limit:
                out_of_memory()
            return (self.net(x) + self.embedding(x[:, 0].abs().long()) - y).square().mean()

    runs = []
    for limit in (10**9, 3):
        model = Sparse(limit)
        fit(model, loader(regression_batches(4, batch_size=8)), MicroBatchOnOOM(), accumulate_grad_batches=2)
        runs.append([[g.to_dense() for g in step] for step in model.gradients])
    for a, b in zip(*runs, strict=True):
        assert_close(a, b, 1e-6)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", 2.5), (torch.mean, 2.5), ("sum", 4.0), ("max", 3.0), (min, 1.0)]
)
def test_logged_values_are_reduced_as_asked(reduce_fx, expected):
    assert merge_logged([torch.tensor(1.0), torch.tensor(3.0)], [0.25, 0.75], reduce_fx) == expected
    assert merge_logged([torch.tensor(1), torch.tensor(3)], [0.25, 0.75], reduce_fx) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("HIP out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to"),
            True,
        ),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: not enough memory: you tried to"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (MemoryError(), False),
        (ValueError("DefaultCPUAllocator: not enough memory"), False),
    ],
)
def test_which_errors_say_that_memory_ran_out(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_cpu_allocators_real_error():
    """A size that no machine has."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.gpu
def test_a_real_out_of_memory_on_a_gpu():
    """Half of the batch fits in what this process may use; the gradient is that of the whole, computed on the CPU."""

    class Wide(Limited):
        def training_step(self, batch, batch_idx):
            x, y = batch
            rows.append(len(x))
            # Each row keeps 16 MiB and more for backward.
            hidden = self.net[1](self.net[0](x)).repeat(1, 2**18)
            return nn.functional.mse_loss(self.net[3](hidden.sin().reshape(len(x), -1, 16).mean(1)), y)

    rows: list[int] = []
    batches = regression_batches(2, batch_size=16)
    whole = Wide()
    fit(whole, loader(batches))
    rows.clear()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(3 * 2**27 / total)
    try:
        model, callback = Wide(), MicroBatchOnOOM()
        fit(model, loader(batches), callback, accelerator="gpu")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert callback.size is not None
    assert rows[0] == 16
    assert max(rows[-2:]) <= callback.size < 16
    for a, b in zip(model.gradients, whole.gradients, strict=True):
        assert_close([g.cpu() for g in a], b, 1e-4)


# -- layers that normalise over the batch, and TensorDicts -------------------------------------------------------------


def test_a_batch_norm_gets_no_part_of_one_sample():
    class Normed(Limited):
        def __init__(self, limit: int) -> None:
            super().__init__(limit)
            self.net[2] = nn.BatchNorm1d(16)

    batches = [[t[:rows] for t in batch] for batch, rows in zip(regression_batches(3, 8), (8, 5, 3), strict=True)]
    model, callback = Normed(3), MicroBatchOnOOM()
    with pytest.warns(UserWarning, match="over those of each part, two or more, so the gradient is another"):
        fit(model, loader(batches), callback)
    assert callback.size == 2
    assert [rows for _, rows in model.notes.rows][-7:] == [2, 2, 2, 2, 3, 2, 3]
    with pytest.warns(UserWarning, match="1 layers"), pytest.raises(torch.OutOfMemoryError) as caught:
        fit(Normed(1), loader(batches), MicroBatchOnOOM())
    assert "with at most 8, 4, 2 samples at a time, and min_size=2 allows no fewer" in caught.value.__notes__[0]


def test_tensordicts_are_split_along_their_batch_dimension():
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")

    class Dicts(Limited):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["x"], batch["deep"]["y"]), batch_idx)["loss"]

    def of(x: Any, y: Any, size: list[int]) -> Any:
        return tensordict.TensorDict({"x": x, "deep": {"y": y}}, size)

    runs = []
    for limit in (10**9, 3):
        model = Dicts(limit)
        fit(model, loader([of(x, y, [len(x)]) for x, y in regression_batches(3, 8)]), MicroBatchOnOOM())
        runs.append(weights(model))
    assert_close(*runs, 1e-6)
    with pytest.raises(MisconfigurationException, match="batch is a TensorDict without a batch dimension"):
        fit(Dicts(), loader([of(x, y, []) for x, y in regression_batches(3, 8)]), MicroBatchOnOOM())


# -- monitors see whole batches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 2])
def test_operations_tokens_and_noise_are_those_of_whole_batches(first):
    """Also where the very first micro-batch fails, and in a window of which one is done again."""
    seen = []
    for limit in (10**9, 3):
        monitor, noise = MFUMonitor(unit="sample", peak_flops=1e12), GradientNoiseScale(count=len_of_first)
        budget = ChinchillaBudget(tokens=10_000, count=len_of_first, landing="ceil", save=False)
        model = Limited(limit, "backward", first=first)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ChinchillaBudget")
            fit(
                model,
                loader(regression_batches(8, 8)),
                MicroBatchOnOOM(),
                monitor,
                noise,
                budget,
                accumulate_grad_batches=2,
            )
        counter = AccumulationController.of(model.trainer).counter.state_dict()
        seen.append((monitor.flop_count.model, counter, noise.average.sums, noise.average.windows))
    (operations, counter, sums, windows), (split_operations, split_counter, split_sums, split_windows) = seen
    assert operations == split_operations > 0
    assert counter == split_counter
    assert counter["largest_micro_batch"] == 8
    assert windows == split_windows
    assert split_sums == pytest.approx(sums, rel=1e-4)


def len_of_first(batch: Any) -> int:
    return len(batch[0])


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(
    "ignore:The dirpath has changed", "ignore:This checkpoint is written inside an accumulation"
)
@pytest.mark.parametrize("first", [0, 5])
def test_a_run_resumed_in_the_middle_of_an_epoch_is_the_same_to_the_bit(tmp_path, first):
    """Shuffled, with dropout; what does not fit comes before the checkpoint or after it."""

    class Shuffled(Limited):
        def training_step(self, batch, batch_idx):
            late = self.trainer.fit_loop.epoch_loop.total_batch_idx < first
            self.limit = 10**9 if late else 3
            return super().training_step((batch, batch.square().mean(1, keepdim=True)), batch_idx)

    def run(folder: str, resumed: str | None = None) -> tuple[Any, int | None]:
        torch.manual_seed(3)
        data = torch.cat([x for x, _ in regression_batches(6, 8)])
        model, callback = Shuffled(3, "backward", dropout=0.2, make_optimizer=adamw), MicroBatchOnOOM()
        keep = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = quiet_trainer(
            callbacks=[callback, ExactResume(), keep],
            max_epochs=2,
            accumulate_grad_batches=2,
            enable_checkpointing=True,
        )
        torch.manual_seed(4)
        batches = DataLoader(data, batch_size=8, shuffle=True)
        trainer.fit(model, batches, ckpt_path=resumed, weights_only=True if resumed else None)
        return weights(model), callback.size

    whole, size = run("whole")
    again, size_again = run("again", str(tmp_path / "whole" / "step=2.ckpt"))
    assert size == size_again == 2
    assert all(map(torch.equal, whole, again))
