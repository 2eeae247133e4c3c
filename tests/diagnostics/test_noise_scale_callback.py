"""GradientNoiseScale: what it hands to the estimator equals gradients computed by hand, on one process and on two."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_ranks
from gradient_counter import VIEWS
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import (
    Regression,
    ResumableLoader,
    ShardedTokenModel,
    TokenModel,
    Trained,
    at,
    fit,
    loader,
    quiet_trainer,
    raising,
    regression_batches,
    saving,
    token_batches,
    weights,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    LossScaler,
    MasterWeightsPrecision,
    MFUMonitor,
    OverflowMonitor,
)
from lightning_mp.callbacks.gradient_noise_scale import GradientNoiseScale


def still(parameters: Any) -> torch.optim.Optimizer:
    """Weights stay as they are, so every gradient can be computed afterwards."""
    return torch.optim.SGD(parameters, lr=0.0)


def still_fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0, fused=True)


def still_last_layer(parameters: Any) -> torch.optim.Optimizer:
    """The rest has gradients, and is in no optimizer."""
    return still(list(parameters)[-2:])


class Recording(GradientNoiseScale):
    """Keeps what the estimator was given: squared norms, inverse sizes, tokens of a sample."""

    def __init__(self, count: Any = None) -> None:
        super().__init__(count=count)
        self.given: list[list[float]] = []
        add = self.average.add

        def record(*numbers: float, tokens_per_sample: float) -> None:
            self.given.append([*numbers, tokens_per_sample])
            add(*numbers, tokens_per_sample=tokens_per_sample)

        self.average.add = record  # type: ignore[method-assign]


def gradient(module: pl.LightningModule, batch: Any) -> Tensor:
    """Of one micro-batch with respect to what is not frozen, by plain torch in fp32."""
    loss = module.training_step(batch, 0)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)]).double()


def alike(batch: Any) -> float:
    return 1.0


def by_hand(module: Any, windows: list[list[Any]], weights: Any = alike, tokens: Any = None) -> Any:
    rows = []
    for window in windows:
        gs = [gradient(module, batch) for batch in window]
        ws = torch.tensor([float(weights(batch)) for batch in window], dtype=torch.float64)
        big = sum(w * g for w, g in zip(ws, gs, strict=True)) / ws.sum()
        sizes = [len(batch[0]) for batch in window]
        seen = sum(tokens(batch) for batch in window) / sum(sizes) if tokens else 0.0
        rows.append([float(gs[0] @ gs[0]), float(big @ big), 1 / sizes[0], 1 / sum(sizes), seen])
    return rows


def in_windows(batches: list[Any], length: int) -> list[list[Any]]:
    return [batches[start : start + length] for start in range(0, len(batches), length)]


def stock_fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


PLUGINS: dict[str, Any] = {
    "stock fp32": list,
    "stock bf16": lambda: [MixedPrecision("bf16-mixed", "cpu")],
    "stock fp16": lambda: [stock_fp16()],
    "fp16": lambda: [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))],
    "bf16": lambda: [AutocastPrecision("bf16-mixed")],
    "masters": lambda: [MasterWeightsPrecision("bf16-true")],
}


@pytest.mark.parametrize("scheduled", [False, True], ids=["Trainer", "AccumulationScheduler"])
@pytest.mark.parametrize("optimizer", [still, still_fused])
@pytest.mark.parametrize("name", PLUGINS)
def test_norms_are_those_of_true_gradients(name: str, optimizer: Any, scheduled: bool) -> None:
    """Loss scale, accumulation and clipping leave no trace; the last window is one short."""
    batches = regression_batches(11)
    module, callback = Regression(optimizer), Recording()
    accumulation = (
        {"callbacks": [callback, AccumulationScheduler({0: 4})]}
        if scheduled
        else {"callbacks": [callback], "accumulate_grad_batches": 4}
    )
    clip = {} if name.startswith("stock") and optimizer is still_fused else {"gradient_clip_val": 1e-3}
    fit(module, batches, plugins=PLUGINS[name](), **accumulation, **clip)
    expected = by_hand(Regression(), in_windows(batches, 4))
    tolerance = 1e-5 if name == "stock fp32" else 0.03 if "bf16" in name or name == "masters" else 0.01
    assert torch.tensor(callback.given) == pytest.approx(torch.tensor(expected), rel=tolerance)
    assert len(expected) == 3


@pytest.mark.parametrize("name", ["stock fp32", "fp16", "masters"])
def test_parameters_in_no_optimizer_have_no_part_in_either_norm(name: str) -> None:
    batches = regression_batches(8)
    callback = Recording()
    fit(Regression(still_last_layer), batches, callback, plugins=PLUGINS[name](), accumulate_grad_batches=2)
    frozen = Regression()
    frozen.net[0].requires_grad_(False)
    expected = by_hand(frozen, in_windows(batches, 2))
    tolerance = {"stock fp32": 1e-5, "fp16": 0.01, "masters": 0.03}[name]
    assert torch.tensor(callback.given) == pytest.approx(torch.tensor(expected), rel=tolerance)


@pytest.mark.parametrize("name", ["stock fp32", "fp16"])
@pytest.mark.parametrize("weight_by", ["token", "batch"])
def test_weights_of_micro_batches_leave_no_trace_in_the_small_gradient(weight_by: str, name: str) -> None:
    """The first micro-batch weighs 2 to 12 tokens; its gradient is the mean over its own."""
    batches = token_batches([6, 3, 11, 2, 12, 5])
    module, callback = TokenModel(still), Recording()
    scheduler = AccumulationScheduler({0: 2}, weight_by=weight_by)
    fit(module, batches, scheduler, callback, plugins=PLUGINS[name]())

    def tokens(batch: Any) -> int:
        return int((batch[1] != -100).sum())

    weights = tokens if weight_by == "token" else alike
    expected = by_hand(TokenModel(), in_windows(batches, 2), weights, tokens)
    assert torch.tensor(callback.given) == pytest.approx(
        torch.tensor(expected), rel=1e-5 if name == "stock fp32" else 0.01
    )


@pytest.mark.parametrize(
    "counting",
    [
        lambda: [MFUMonitor(unit="sample"), AccumulationScheduler({0: 2})],
        lambda: [AccumulationScheduler({0: 2}, count=lambda batch: len(batch[0]))],
    ],
    ids=["monitor", "count"],
)
def test_samples_are_not_called_tokens(counting: Any) -> None:
    callback = Recording()
    fit(Regression(still), regression_batches(6), *counting(), callback)
    assert [tokens for *_, tokens in callback.given] == [0.0] * 3


@pytest.mark.parametrize("name", ["stock fp16", "fp16"])
@pytest.mark.parametrize("optimizer", [still, still_fused])
def test_skipped_steps_are_left_out(name: str, optimizer: Any) -> None:
    batches = regression_batches(8)
    module, callback = Regression(optimizer, overflows=[2]), Recording()
    fit(module, batches, callback, plugins=PLUGINS[name](), accumulate_grad_batches=2)
    windows = in_windows(batches, 2)
    expected = by_hand(Regression(), [windows[0], *windows[2:]])
    assert torch.tensor(callback.given) == pytest.approx(torch.tensor(expected), rel=0.01)


def test_another_monitor_on_a_stock_plugin_does_not_disturb() -> None:
    given = []
    for others in ([], [OverflowMonitor()]):
        callback = Recording()
        fit(Regression(still), regression_batches(6), callback, *others, plugin=stock_fp16(), accumulate_grad_batches=2)
        given.append(callback.given)
    assert given[0] == given[1]
    assert len(given[0]) == 3


# -- two processes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", ["stock fp32", "fp16"])
def test_ddp_compares_each_ranks_own_gradient_with_the_reduced_one(name: str, micro_batches: int) -> None:
    batches = regression_batches(8)

    def train(rank: int) -> Any:
        callback = Recording()
        trainer = quiet_trainer(
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
            callbacks=[callback],
            plugins=PLUGINS[name](),
            accumulate_grad_batches=micro_batches,
        )
        trainer.fit(Regression(still), loader(batches[rank::2]))
        return callback.given

    first, second = run_ranks(train, 2)
    assert first == second
    expected = []
    for window in in_windows(batches, 2 * micro_batches):
        row = by_hand(Regression(), [window])[0]
        own = [gradient(Regression(), batch) for batch in window[:2]]  # both ranks' first micro-batches
        expected.append([float(sum(g @ g for g in own)) / 2, *row[1:]])
    assert torch.tensor(first) == pytest.approx(torch.tensor(expected), rel=1e-5 if name == "stock fp32" else 0.01)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(("name", "optimizer"), [("stock fp32", still_last_layer), ("bf16", still)])
def test_fsdp2_compares_the_first_reduced_gradient_with_that_of_the_window(name: str, optimizer: Any) -> None:
    counts = [[6, 3, 11, 8], [4, 10, 2, 5]]
    batches = [token_batches(row) for row in counts]

    def train(rank: int) -> Any:
        callback = Recording()
        scheduler = AccumulationScheduler({0: 2}, weight_by="token", sync="micro_batch")
        trainer = quiet_trainer(
            devices=2,
            strategy=ModelParallelStrategy(2, 1, process_group_backend="gloo"),
            callbacks=[callback, scheduler],
            plugins=PLUGINS[name](),
        )
        trainer.fit(ShardedTokenModel(optimizer), loader(batches[rank]))
        return callback.given

    def tokens(batch: Any) -> int:
        return int((batch[1] != -100).sum())

    first, second = run_ranks(train, 2)
    assert first == second
    reference, expected = TokenModel(), []
    reference.embedding.requires_grad_(optimizer is still)
    for start in (0, 2):
        both = [row[start + index] for index in (0, 1) for row in batches]
        small = by_hand(reference, [both[:2]], tokens)[0]
        row = by_hand(reference, [both], tokens, tokens)[0]
        expected.append([small[1], row[1], small[3], row[3], row[4]])
    assert torch.tensor(first) == pytest.approx(torch.tensor(expected), rel=1e-5 if name == "stock fp32" else 0.03)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_fsdp2_that_reduces_once_per_window_has_no_small_gradient() -> None:
    def train(rank: int) -> Any:
        callback, scheduler = Recording(), AccumulationScheduler({0: 2}, sync="window")
        strategy = ModelParallelStrategy(2, 1, process_group_backend="gloo")
        trainer = quiet_trainer(devices=2, strategy=strategy, callbacks=[callback, scheduler])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.fit(ShardedTokenModel(still), loader(token_batches([6, 3, 11, 8])))
        return callback.given, [str(warning.message) for warning in told]

    (given, messages), (_, _) = run_ranks(train, 2)
    assert given == []
    assert sum("sync='micro_batch'" in message for message in messages if "GradientNoiseScale" in message) == 1


# -- batches without a tensor ------------------------------------------------------------------------------------------


class Graph:
    """What graph libraries batch: no tensor that can be found from outside."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, *_: Any, **__: Any) -> "Graph":
        return self


class OnGraphs(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch.x, batch.y), batch_idx)


def graph_size(batch: Graph) -> int:
    return len(batch.x)


@pytest.mark.parametrize(
    "arguments",
    [
        {"callbacks": [AccumulationScheduler({0: 2}, weight_by="batch")], "own": graph_size},
        {"callbacks": [AccumulationScheduler({0: 2}, count=graph_size)], "own": None},
        {"accumulate_grad_batches": 2, "own": graph_size},
    ],
    ids=["both", "the scheduler's count", "its own count"],
)
def test_samples_of_batches_without_a_tensor_are_those_of_a_count(arguments: dict[str, Any]) -> None:
    batches = regression_batches(8)
    count, callbacks = arguments["own"], arguments.get("callbacks", [])
    callback = Recording(count)
    trainer = quiet_trainer(
        callbacks=[callback, *callbacks], accumulate_grad_batches=arguments.get("accumulate_grad_batches", 1)
    )
    trainer.fit(OnGraphs(still), loader([Graph(*batch) for batch in batches]))
    given = torch.tensor(callback.given)[:, :4]
    assert given == pytest.approx(torch.tensor(by_hand(Regression(), in_windows(batches, 2)))[:, :4], rel=1e-5)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning")
def test_where_no_samples_can_be_counted_the_run_goes_on_without_an_estimate() -> None:
    callback, module, plain = Recording(), OnGraphs(), OnGraphs()
    graphs = [Graph(*batch) for batch in regression_batches(4)]
    fit(plain, graphs, accumulate_grad_batches=2)
    trainer = quiet_trainer(callbacks=[callback], accumulate_grad_batches=2)
    message = (
        r"no estimate for now: No samples .* type 'Graph'.* Pass count=, a function from a batch to its number of s"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        trainer.fit(module, loader(graphs))
    assert sum("no estimate" in str(warning.message) for warning in caught) == 1
    assert callback.given == []
    assert all(map(torch.equal, weights(module), weights(plain)))


class OnBoth(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch.x, batch.y) if isinstance(batch, Graph) else batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning")
@pytest.mark.filterwarnings("ignore:GradientNoiseScale has no estimate for now")
def test_ranks_do_not_wait_for_one_that_cannot_count_its_batch() -> None:
    """All of them leave that window out."""

    def train(rank: int) -> list[list[float]]:
        batches: list[Any] = regression_batches(12)[rank::2]
        if rank == 1:
            batches[3] = Graph(*batches[3])
        callback = Recording()
        trainer = quiet_trainer(
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo"),
            callbacks=[callback],
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
        )
        trainer.fit(OnBoth(still), loader(batches))
        return callback.given

    first, second = run_ranks(train, 2, timeout_seconds=30)
    assert len(first) == 2
    assert first == second


def known_noise() -> Trained:
    """The gradient of a sample is the sample: a fixed vector and noise around it."""
    return Trained(lambda module, batch: (batch @ module.weight).mean(), weight=lambda: nn.Parameter(torch.zeros(64)))


@pytest.mark.full
def test_known_noise_is_found_within_a_tenth_after_400_windows() -> None:
    """|G|^2 = 1, trace = 20."""
    generator = torch.Generator().manual_seed(5)
    true = torch.randn(64, generator=generator)
    true /= true.norm()
    samples = true + torch.randn(1600, 4, 64, generator=generator) * (20 / 64) ** 0.5
    callback = GradientNoiseScale()
    trainer = fit(known_noise(), list(samples), callback, accumulate_grad_batches=4)
    estimate = callback.estimate
    assert estimate is not None
    assert estimate.windows == 400
    assert estimate.samples == pytest.approx(20.0, rel=0.1)
    assert estimate.low < 20.0 < estimate.high
    assert estimate.high - estimate.low < 8.0
    assert trainer.callback_metrics["mp/noise_scale"] == pytest.approx(20.0, rel=0.1)


class _Cost(TorchDispatchMode):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parameter_bytes = sum(p.nbytes for p in module.parameters())
        self.shapes = {p.shape for p in module.parameters()}
        self.norm_bytes = self.waits = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.waits += name == "aten::_local_scalar_dense"
        self.operations += name not in VIEWS
        if "norm" in name and name not in VIEWS:
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.shape in self.shapes]
            self.norm_bytes += sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def operations_per_window(layers: int, callbacks: list[Callback], plugins: list[Any]) -> int:
    class Deep(Regression):
        def __init__(self) -> None:
            super().__init__(still_fused)
            self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)), self.net)

    module = Deep()
    mode = _Cost(module)

    class Counting(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (4, 8):
                (mode.__enter__ if batch_idx == 4 else lambda: mode.__exit__(None, None, None))()

    fit(module, regression_batches(12), *callbacks, Counting(), plugins=plugins, accumulate_grad_batches=4)
    return mode.operations


def test_the_number_of_its_operations_does_not_grow_with_the_model() -> None:
    """One norm over all gradients of the first micro-batch, and small vectors: with 8 and 32 more tensors."""
    added = []
    for layers in (4, 16):
        plugins = [PLUGINS["bf16"]() for _ in range(2)]
        without, with_it = (
            operations_per_window(layers, callbacks, plugin)
            for callbacks, plugin in zip(([], [GradientNoiseScale()]), plugins, strict=True)
        )
        added.append(with_it - without)
    assert added[0] == added[1] <= 30


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_not_empty_before_have_no_part_in_the_small_one(set_to_none: bool) -> None:
    """A module that zeroes some gradients in place, and one that starts from another gradient: both measured alike."""
    batches = regression_batches(8)

    class Keeps(Regression):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            for parameter in self.parameters():
                parameter.grad = None if set_to_none else torch.ones_like(parameter)

    callback = Recording()
    fit(Keeps(still), batches, callback, accumulate_grad_batches=2)
    expected = by_hand(Regression(), in_windows(batches, 2))
    assert [row[0] for row in callback.given] == pytest.approx([row[0] for row in expected], rel=1e-5)


# -- messages and life cycle -------------------------------------------------------------------------------------------


def test_without_two_sizes_it_says_so_once() -> None:
    callback = Recording()
    trainer = quiet_trainer(callbacks=[callback], max_epochs=2)
    with pytest.warns(UserWarning, match="a step is one micro-batch and its gradients come from one process") as told:
        trainer.fit(Regression(still), loader(regression_batches(4)))
    messages = [str(warning.message) for warning in told if "GradientNoiseScale" in str(warning.message)]
    assert len(messages) == 1
    assert "AccumulationScheduler({0: 2})" in messages[0]
    assert callback.given == []
    assert callback.estimate is None


def test_windows_that_grow_are_counted_as_they_come() -> None:
    callback = Recording()
    trainer = quiet_trainer(callbacks=[callback, AccumulationScheduler({0: 1, 1: 2})], max_epochs=2)
    with pytest.warns(UserWarning, match="has no estimate for now"):
        trainer.fit(Regression(still), loader(regression_batches(4)))
    assert len(callback.given) == 2


def test_manual_optimization_is_refused() -> None:
    module = Regression(still)
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="needs automatic optimization"):
        fit(module, regression_batches(2), GradientNoiseScale())


@pytest.mark.parametrize("name", ["stock fp32", "fp16"])
def test_a_resumed_run_ends_with_the_same_averages(name: str, tmp_path: Any) -> None:
    batches = regression_batches(12)

    def train(max_epochs: int, *others: Callback, ckpt_path: Any = None) -> Recording:
        callback = Recording()
        trainer = quiet_trainer(
            callbacks=[callback, *others], plugins=PLUGINS[name](), accumulate_grad_batches=4, max_epochs=max_epochs
        )
        trainer.fit(Regression(), loader(batches), ckpt_path=ckpt_path)
        return callback

    straight, first = train(2), train(1, at(saving(tmp_path / "3.ckpt"), "on_train_epoch_end"))
    resumed = train(2, ckpt_path=tmp_path / "3.ckpt")
    assert first.average.windows == 3
    assert resumed.average.state_dict() == straight.average.state_dict()
    assert straight.average.windows == 6


def test_a_window_that_a_resumed_run_continues_is_left_out(tmp_path: Any) -> None:
    def train(*others: Callback, ckpt_path: Any = None) -> Recording:
        callback = Recording()
        scheduler = AccumulationScheduler({0: 4}, save_partial_gradients=True)
        trainer = quiet_trainer(callbacks=[callback, scheduler, *others], plugins=PLUGINS["fp16"]())
        trainer.fit(Regression(), ResumableLoader(regression_batches(12)), ckpt_path=ckpt_path)
        return callback

    with pytest.raises(InterruptedError):
        train(at(saving(tmp_path / "inside.ckpt"), batch_idx=5), at(raising(InterruptedError()), batch_idx=5))
    first, _, third = train().given
    assert train(ckpt_path=tmp_path / "inside.ckpt").given == [third]
    assert first != third


def test_hooks_are_taken_away_and_gradients_are_not_touched() -> None:
    fails = at(raising(RuntimeError("planted")), "on_before_backward", step=1)
    module = Regression()
    with pytest.raises(RuntimeError, match="planted"):
        fit(module, regression_batches(8), GradientNoiseScale(), fails, accumulate_grad_batches=2)
    assert not any(p._backward_hooks for p in module.parameters())
    weights = []
    for callbacks in ([], [GradientNoiseScale()]):
        module = Regression()
        fit(module, regression_batches(8), callbacks=callbacks, accumulate_grad_batches=2)
        weights.append([p.detach().clone() for p in module.parameters()])
        assert not any(p._backward_hooks for p in module.parameters())
    assert all(map(torch.equal, *weights))
