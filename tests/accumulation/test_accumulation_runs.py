"""AccumulationScheduler in whole runs: samples and tokens as clocks, checkpoints, stops, sums instead of means."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import (
    Regression,
    ResumableLoader,
    TokenModel,
    adamw,
    fit,
    fused_adamw,
    loader,
    quiet_trainer,
    regression_batches,
    sgd,
    token_batches,
    weights,
)
from torch import Tensor, nn

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    LossScaler,
    MasterWeightsPrecision,
    MFUMonitor,
)
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.accumulation.partial_state import PartialAccumulation


class Lengths(Callback):
    """Micro-batches of every window."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._open = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self._open += 1

    def on_before_zero_grad(self, *_: Any) -> None:
        pass

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.lengths):
            self.lengths.append(self._open)
            self._open = 0


def lengths_of(module: pl.LightningModule, data: Any, *callbacks: Callback, **arguments: Any) -> list[int]:
    seen = Lengths()
    quiet_trainer(callbacks=[*callbacks, seen], **arguments).fit(module, data)
    return seen.lengths


@pytest.mark.parametrize("counting", [MFUMonitor, lambda: AccumulationScheduler({0: 1})], ids=["monitor", "scheduler"])
@pytest.mark.parametrize(
    "plugin",
    [
        list,
        lambda: [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**16, growth_interval=3))],
        lambda: [MasterWeightsPrecision("bf16-true")],
    ],
    ids=["stock fp32", "fp16", "masters"],
)
def test_what_counts_does_not_change_a_run_whose_steps_are_one_micro_batch(plugin: Any, counting: Any) -> None:
    """Also with micro-batches of very different sizes: loss and gradients stay where fp16 had them."""
    found = []
    for callbacks in ([], [counting()]):
        module, plugins = TokenModel(adamw), plugin()
        fit(module, token_batches([2, 50, 3, 7, 90, 5, 2, 11]), plugins=plugins, callbacks=callbacks)
        scaler = plugins[0].scaler if plugins else None
        found.append((weights(module), scaler and scaler.get_scale()))
    assert found[0][1] == found[1][1]
    assert all(torch.equal(one, other) for one, other in zip(found[0][0], found[1][0], strict=True))


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_samples_are_a_clock() -> None:
    """Batches of 4. A window sees the samples up to the window before the last one: 0, 0, 4, 8, 12, then 20."""
    scheduler = AccumulationScheduler({0: 1, 12: 2, 20: 3}, unit="sample")
    assert lengths_of(Regression(), loader(regression_batches(12)), scheduler) == [1, 1, 1, 1, 2, 2, 3, 1]


def test_tokens_are_a_clock_on_one_rank_and_on_two() -> None:
    counts = [[5, 9, 4, 8, 7, 3, 9, 6, 5, 8], [2, 3, 9, 5, 1, 7, 4, 8, 2, 2]]

    def expected(tokens_per_micro_batch: Sequence[int]) -> list[int]:
        """The rule, walked by hand."""
        left, windows = list(tokens_per_micro_batch), [0]
        lengths = []
        while left:
            length = min(3 if sum(windows[:-1]) >= 30 else 2 if sum(windows[:-1]) >= 10 else 1, len(left))
            windows.append(sum(left[:length]))
            del left[:length]
            lengths.append(length)
        return lengths

    def train(rank: int, **arguments: Any) -> list[int]:
        scheduler = AccumulationScheduler({0: 1, "10": 2, "30": 3}, unit="token")
        return lengths_of(TokenModel(), loader(token_batches(counts[rank])), scheduler, **arguments)

    assert train(0) == expected(counts[0])
    both = [a + b for a, b in zip(*counts, strict=True)]
    assert run_ranks(lambda rank: train(rank, strategy="ddp", devices=2), 2) == [expected(both)] * 2
    assert expected(both) != expected(counts[0])


@pytest.mark.parametrize("unit", ["sample", "token"])
def test_a_resumed_run_has_the_same_windows(unit: Any, tmp_path: Path) -> None:
    """A checkpoint settles the token account early, which must not move a threshold."""
    batches = token_batches([5, 9, 4, 8, 7, 3, 9, 6, 5, 8, 4, 4])

    def callbacks() -> list[Callback]:
        return [AccumulationScheduler({0: 1, 6: 2, 10: 3}, unit=unit)]

    straight = TokenModel(adamw)
    lengths = lengths_of(straight, ResumableLoader(batches), *callbacks())
    for stop in range(1, len(lengths)):
        split = SaveAndDie(tmp_path / "x.ckpt", sum(lengths[:stop]))
        with pytest.raises(Interrupted):
            fit(TokenModel(adamw), ResumableLoader(batches), *callbacks(), split)
        resumed, seen = TokenModel(adamw), Lengths()
        seen.lengths = lengths[:stop]
        again = quiet_trainer(callbacks=[*callbacks(), seen])
        again.fit(resumed, ResumableLoader(batches), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
        assert seen.lengths == lengths
        assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(straight), strict=True))


def test_a_target_batch_counts_the_ranks() -> None:
    def train(rank: int, **arguments: Any) -> list[int]:
        scheduler = AccumulationScheduler(target_samples={0: 8, 3: 24}, unit="step")
        return lengths_of(Regression(), loader(regression_batches(12)), scheduler, **arguments)

    assert train(0) == [2, 2, 2, 6]
    assert run_ranks(lambda rank: train(rank, strategy="ddp", devices=2), 2) == [[1, 1, 1, 3, 3, 3]] * 2


def test_a_target_batch_in_tokens_counts_padding() -> None:
    batches = token_batches([6, 5, 6, 6, 5, 6])
    input_tokens = batches[0][1].numel()
    scheduler = AccumulationScheduler(target_tokens=3 * input_tokens)
    assert lengths_of(TokenModel(), loader(batches), scheduler) == [3, 3]


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
def test_a_target_batch_in_tokens_is_in_those_that_count_returns(as_tensor: bool, caplog: Any) -> None:
    def count(batch: Any) -> Any:
        targets = (batch[1] != -100).sum()
        return targets if as_tensor else int(targets)

    batches = token_batches([4, 4, 4, 4, 4, 4])
    assert batches[0][1].numel() > 4
    with caplog.at_level("INFO"):
        assert lengths_of(TokenModel(), loader(batches), AccumulationScheduler(target_tokens=12, count=count)) == [3, 3]
    assert (
        "AccumulationScheduler: 3 micro-batches per step, calculated from the first one of the run, which has 4 tokens"
        " over all ranks." in caplog.text
    )


def test_tokens_as_a_clock_need_tokens() -> None:
    with pytest.raises(MisconfigurationException, match="^AccumulationScheduler cannot count tokens in a batch"):
        lengths_of(Regression(), loader(regression_batches(2)), AccumulationScheduler({0: 1}, unit="token"))


# -- a sum divided by a number of its own ------------------------------------------------------------------------------


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
def test_a_loss_that_was_divided_by_num_items_in_batch_is_not_divided_twice(as_tensor: bool) -> None:
    """Hugging Face models return sum / num_items_in_batch; the window's gradient is the token mean all the same."""

    class SumOver(TokenModel):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.head(self.embedding(batch["input_ids"])).flatten(0, 1)
            total = nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
            return total / batch["num_items_in_batch"]

    lengths = [6, 3, 9, 4, 7]
    plain = token_batches(lengths)
    declared: Any = 29 if not as_tensor else torch.tensor(29)
    dicts = [{"input_ids": x, "labels": y, "num_items_in_batch": declared} for x, y in plain]
    summed, mean = SumOver(adamw), TokenModel(adamw)
    fit(summed, dicts, AccumulationScheduler({0: 2}))
    fit(mean, plain, AccumulationScheduler({0: 2}))
    for a, b in zip(weights(summed), weights(mean), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# -- stopping ----------------------------------------------------------------------------------------------------------


class StopIn(Callback):
    """Asks for the end of the run in a micro-batch."""

    def __init__(self, batch_idx: int) -> None:
        self.batch_idx = batch_idx

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.should_stop or batch_idx == self.batch_idx


@pytest.mark.parametrize(("stop", "steps"), [(0, 1), (1, 1), (3, 1), (4, 2), (7, 2), (8, 3)])
def test_a_run_that_is_told_to_stop_ends_at_the_end_of_its_window(stop: int, steps: int) -> None:
    """D38."""
    trainer = quiet_trainer(callbacks=[AccumulationScheduler({0: 4}), StopIn(stop)], max_epochs=3)
    module = Regression()
    trainer.fit(module, loader(regression_batches(16)))
    assert (trainer.global_step, module.seen_batches) == (steps, 4 * steps)
    assert trainer.fit_loop.min_steps is None, "the user's own setting is back"


def test_early_stopping_after_a_validation_inside_a_window_waits_too() -> None:
    class Validated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("worse", torch.tensor(float(self.seen_batches)))

    module = Validated()
    trainer = quiet_trainer(
        callbacks=[AccumulationScheduler({0: 4}), EarlyStopping("worse", patience=1)],
        val_check_interval=3,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, loader(regression_batches(24)), loader(regression_batches(1)))
    assert (trainer.global_step, module.seen_batches) == (2, 8), "told in batch 6, ended with the window"


def test_the_users_min_steps_still_counts() -> None:
    trainer = quiet_trainer(callbacks=[AccumulationScheduler({0: 2}), StopIn(0)], min_steps=3, min_epochs=0)
    trainer.fit(Regression(), loader(regression_batches(16)))
    assert (trainer.global_step, trainer.fit_loop.min_steps) == (3, 3)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved_steps(folder: Path) -> dict[int, int]:
    """Optimizer step -> micro-batches behind it, of every checkpoint in a folder."""
    found = {}
    for file in folder.glob("*.ckpt"):
        saved = torch.load(file, weights_only=True)
        progress = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
        found[saved["global_step"]] = progress["ready"]
    return found


def test_checkpoints_after_a_validation_inside_a_window_wait_for_its_end(tmp_path: Path) -> None:
    """D35. They are still judged by that validation's metric."""

    class Validated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", torch.tensor(float(self.seen_batches)))

    checkpoint = ModelCheckpoint(tmp_path, monitor="val", mode="max", save_top_k=-1, filename="{step}-{val:.0f}")
    trainer = quiet_trainer(
        callbacks=[AccumulationScheduler({0: 4}), checkpoint],
        enable_checkpointing=True,
        val_check_interval=3,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    with pytest.warns(UserWarning, match=r"monitor='val'\) validated inside an accumulation window"):
        trainer.fit(Validated(), loader(regression_batches(12)), loader(regression_batches(1)))
    assert saved_steps(tmp_path) == {1: 4, 2: 8, 3: 12}
    assert {file.name for file in tmp_path.glob("*.ckpt")} >= {"step=1-val=3.ckpt", "step=2-val=6.ckpt"}
    assert not {"on_train_batch_end", "on_validation_end"} & set(vars(checkpoint)), "unwrapped after fit"


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_does_not_save_inside_its_first_window(tmp_path: Path) -> None:
    """Lightning's ModelCheckpoint forgets over a resume that it has saved at this step."""
    batches = regression_batches(16)

    def checkpoint(folder: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")

    def trainer(folder: str, **arguments: Any) -> pl.Trainer:
        callbacks = [AccumulationScheduler({0: 4}), checkpoint(folder)]
        return quiet_trainer(callbacks=callbacks, enable_checkpointing=True, **arguments)

    trainer("first", max_steps=2).fit(Regression(), ResumableLoader(batches))
    file = tmp_path / "first" / "step=2.ckpt"
    trainer("again").fit(Regression(), ResumableLoader(batches), ckpt_path=file, weights_only=True)
    assert saved_steps(tmp_path / "again") == {4: 16}


# -- inside a window ---------------------------------------------------------------------------------------------------


class Interrupted(RuntimeError):
    pass


class SaveAndDie(Callback):
    """A power split right after a checkpoint."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after, self.seen = path, after, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen += 1
        if self.seen == self.after:
            trainer.save_checkpoint(self.path)
            raise Interrupted


PLUGINS: dict[str, Any] = {
    "fp32": list,
    "16-mixed": lambda: [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10))],
    "bf16-mixed": lambda: [AutocastPrecision("bf16-mixed")],
    "bf16-true": lambda: [MasterWeightsPrecision("bf16-true")],
}


class Castable(TokenModel):
    """Takes fp32 logits whatever its weights are."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.embedding(x)).flatten(0, 1).float(), y.flatten())


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("precision", PLUGINS)
def test_interrupted_after_any_micro_batch_a_run_ends_the_same(precision: str, optimizer: Any, tmp_path: Path) -> None:
    """D35, promise 6: three windows of 3, 3 and 2 micro-batches, every token counted once, the same weights."""
    batches = token_batches([5, 9, 4, 8, 7, 3, 9, 6])

    def trainer(*more: Callback) -> pl.Trainer:
        scheduler = AccumulationScheduler({0: 3}, save_partial_gradients=True)
        return quiet_trainer(
            callbacks=[scheduler, ChinchillaBudget(tokens=51), *more], plugins=PLUGINS[precision](), max_epochs=-1
        )

    straight = Castable(optimizer)
    trainer().fit(straight, ResumableLoader(batches))
    for after in range(1, 8):
        with pytest.raises(Interrupted):
            trainer(SaveAndDie(tmp_path / "x.ckpt", after)).fit(Castable(optimizer), ResumableLoader(batches))
        resumed, again = Castable(optimizer), trainer()
        again.fit(resumed, ResumableLoader(batches), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
        controller = AccumulationController.of(again)
        assert controller is not None
        assert (controller.counter.tokens, again.global_step) == (51, 3)
        assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(straight), strict=True)), after


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_partial_gradients_of_two_ranks_are_the_mean_over_them(tmp_path: Path) -> None:
    counts = [[5, 9, 4, 8, 7, 3], [2, 3, 9, 5, 1, 7]]

    def train(rank: int, **fit: Any) -> list[Tensor]:
        more = [SaveAndDie(tmp_path / "x.ckpt", 5)] if fit.pop("dies", False) else []
        module = TokenModel(adamw)
        scheduler = AccumulationScheduler({0: 3}, save_partial_gradients=True)
        trainer = quiet_trainer(callbacks=[scheduler, *more], strategy="ddp", devices=2)
        try:
            trainer.fit(module, ResumableLoader(token_batches(counts[rank])), **fit)
        except Interrupted:
            return []
        return [w.clone() for w in weights(module)]

    straight = run_ranks(train, 2)[0]
    run_ranks(lambda rank: train(rank, dies=True), 2)
    first, second = run_ranks(lambda rank: train(rank, ckpt_path=tmp_path / "x.ckpt", weights_only=True), 2)
    for a, b, c in zip(first, second, straight, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-7)


@pytest.mark.full
def test_partial_gradients_of_ranks_that_use_different_layers_are_saved(tmp_path: Path) -> None:
    """Each rank has gradients of other parameters when the checkpoint is written."""

    class Branches(Regression):
        def __init__(self) -> None:
            super().__init__(sgd)
            self.other = nn.Linear(8, 1, bias=False)

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            net = self.net if (batch_idx + self.trainer.global_rank) % 2 == 0 else self.other
            return nn.functional.mse_loss(net(batch[0]), batch[1])

    def train(rank: int, **fit: Any) -> list[Tensor]:
        more = [SaveAndDie(tmp_path / "x.ckpt", 1)] if fit.pop("dies", False) else []
        module = Branches()
        scheduler = AccumulationScheduler({0: 2}, save_partial_gradients=True)
        strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
        trainer = quiet_trainer(callbacks=[scheduler, *more], strategy=strategy, devices=2)
        try:
            trainer.fit(module, ResumableLoader(regression_batches(4)[2 * rank :][:2]), **fit)
        except Interrupted:
            return []
        return [w.clone() for w in weights(module)]

    straight = run_ranks(train, 2)[0]
    run_ranks(lambda rank: train(rank, dies=True), 2)
    assert {"net.0.weight", "other.weight"} <= torch.load(tmp_path / "x.ckpt")[PartialAccumulation.key][
        "gradients"
    ].keys()
    for resumed in run_ranks(lambda rank: train(rank, ckpt_path=tmp_path / "x.ckpt", weights_only=True), 2):
        for a, b in zip(resumed, straight, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.* the checkpoint holds no loss scale")
def test_a_partial_gradient_goes_on_at_another_loss_scale(tmp_path: Path) -> None:
    """Saved in fp32 and resumed in 16-mixed: the gradient so far is not divided by a scale that it never had."""

    def trainer(plugins: list[Any], *more: Callback) -> pl.Trainer:
        scheduler = AccumulationScheduler({0: 4}, save_partial_gradients=True)
        return quiet_trainer(callbacks=[scheduler, *more], plugins=plugins)

    def half() -> list[Any]:
        return [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))]

    data, straight, resumed = regression_batches(4), Regression(sgd), Regression(sgd)
    trainer([]).fit(straight, ResumableLoader(data))
    with pytest.raises(Interrupted):
        trainer([], SaveAndDie(tmp_path / "x.ckpt", 2)).fit(Regression(sgd), ResumableLoader(data))
    trainer(half()).fit(resumed, ResumableLoader(data), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    for a, b in zip(weights(resumed), weights(straight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_partial_gradients_of_another_model_are_refused(tmp_path: Path) -> None:
    def trainer(*more: Callback) -> pl.Trainer:
        return quiet_trainer(callbacks=[AccumulationScheduler({0: 3}, save_partial_gradients=True), *more])

    with pytest.raises(Interrupted):
        trainer(SaveAndDie(tmp_path / "x.ckpt", 1)).fit(Regression(), ResumableLoader(regression_batches(4)))
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
    gradients = saved["lightning_mp_partial_window"]["gradients"]
    gradients["net.9.weight"] = gradients.pop("net.0.weight")
    torch.save(saved, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"parameters that the model does not have: net\.9\.weight\. Resume with the"):
        trainer().fit(Regression(), ResumableLoader(regression_batches(4)), ckpt_path=tmp_path / "x.ckpt")


def test_partial_gradients_that_are_kept_elsewhere_are_refused() -> None:
    scheduler = AccumulationScheduler({0: 2}, save_partial_gradients=True)
    plugin = MasterWeightsPrecision("bf16-true", fp32_gradients=True)
    with pytest.raises(MisconfigurationException, match="keeps the gradients of an open window in separate buffers"):
        fit(Castable(), token_batches([3, 3]), scheduler, plugin=plugin)
