"""MFUMonitor under a clock of our own: every figure against what one computes by hand."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from memory_logger import MemoryLogger
from small_models import TokenModel, Trained, fit, fused_adamw, loader, quiet_trainer, token_batches
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode as get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    LossScaler,
    MasterWeightsPrecision,
    OverflowMonitor,
)
from lightning_mp.callbacks.mfu_monitor import MFUMonitor
from lightning_mp.ground.flops import hardware
from lightning_mp.ground.flops.flop_tally import FlopTally
from lightning_mp.ground.modules.stand_ins import sum_of_outputs
from lightning_mp.training.precision.tf32 import tf32_matmuls_and_convolutions
from lightning_mp.training.tokens.count_unit import counted_unit

FLOPS_PER_TOKEN = 6 * 8 * 11  # the head alone multiplies
PEAK = 1e6


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Timed(TokenModel):
    """Each training step takes ``seconds`` in turn."""

    def __init__(
        self, clock: Clock, seconds: list[float], optimizer: Any = None, overflows: tuple[int, ...] = ()
    ) -> None:
        super().__init__(*([optimizer] if optimizer is not None else []))
        self.clock, self.seconds, self.overflows, self.steps = clock, iter(seconds), overflows, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.now += next(self.seconds)
        loss = super().training_step(batch[:2] if isinstance(batch, list) else [batch["x"], batch["labels"]], batch_idx)
        self.steps += 1
        return loss * torch.inf if self.steps - 1 in self.overflows else loss


class Validated(Timed):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 50.0


def batches(rows: list[int], columns: int = 5) -> list[list[Tensor]]:
    """Micro-batches of so many rows; the tokens of each are rows x columns."""
    return [[torch.zeros(n, columns, dtype=torch.long), torch.ones(n, columns, dtype=torch.long)] for n in rows]


def monitor(clock: Clock, **arguments: Any) -> MFUMonitor:
    made = MFUMonitor(**({"peak_flops": PEAK} | arguments))
    made._clock = clock
    return made


def train(
    seconds: list[float], rows: list[int], *others: Any, arguments: dict[str, Any] | None = None, **trainer: Any
) -> tuple[MFUMonitor, list[dict[str, float]], pl.Trainer]:
    """Of each optimizer step what was logged; where nothing was, there is no row."""
    clock, logger = Clock(), MemoryLogger()
    made = monitor(clock, **(arguments or {}))
    runner = fit(Timed(clock, seconds), batches(rows), made, *others, logger=logger, log_every_n_steps=1, **trainer)
    return made, [row for _, row in logger.ours()], runner


# -- rates -------------------------------------------------------------------------------------------------------------


def test_rates_by_hand() -> None:
    """The first step warms up; then 10, 20 and 30 tokens in 2, 2 and 6 seconds."""
    made, rows, _ = train([9.0, 2.0, 2.0, 6.0], [1, 2, 4, 6], arguments={"window": 2})
    total = made.total
    assert total.tokens_per_second == total.nonpad_tokens_per_second == (10 + 20 + 30) / 10
    assert total.mfu == total.hfu == FLOPS_PER_TOKEN * 60 / (PEAK * 10)
    assert total.goodput == 1.0
    assert (made.throughput.totals.input_tokens, made.throughput.totals.seconds) == (65, 10.0)
    assert "tokens_per_second" not in rows[0]
    assert [row["tokens_per_second"] for row in rows[1:]] == [10 / 2, 30 / 4, 50 / 8]
    assert [row["mfu"] for row in rows[1:]] == [FLOPS_PER_TOKEN * rate / PEAK for rate in (5.0, 7.5, 6.25)]
    assert rows[-1]["hfu"] == rows[-1]["mfu"]


def test_accumulation_is_read_at_the_ends_of_windows() -> None:
    made, rows, trainer = train([1.0] * 6, [2] * 6, AccumulationScheduler({0: 2}))
    assert trainer.global_step == 3
    assert made.total.tokens_per_second == 40 / 4
    assert ["tokens_per_second" in row for row in rows] == [False, True, True]


def test_validation_is_told_apart_and_the_sanity_check_too() -> None:
    clock = Clock()
    made = monitor(clock)
    trainer = quiet_trainer(callbacks=[made], val_check_interval=2, num_sanity_val_steps=2)
    module, data = Validated(clock, [1.0] * 5), loader(batches([2] * 5))
    trainer.fit(module, data, loader(batches([1, 1])))
    totals = made.throughput.totals
    assert totals.validation_seconds == 2 * 100.0
    assert totals.seconds == 4.0
    assert made.total.tokens_per_second == 10.0


def test_validation_inside_of_the_first_window_does_not_end_the_warm_up() -> None:
    clock = Clock()
    made = monitor(clock)
    trainer = quiet_trainer(callbacks=[made, AccumulationScheduler({0: 2})], val_check_interval=1)
    trainer.fit(Validated(clock, [7.0, 7.0, 1.0, 1.0, 1.0, 1.0]), loader(batches([2] * 6)), loader(batches([1])))
    totals = made.throughput.totals
    assert (totals.timed_input_tokens, totals.seconds, totals.validation_seconds) == (40, 4.0, 6 * 50.0)


@pytest.mark.parametrize("counts", [False, True])
def test_padding_is_counted_for_the_devices_and_not_for_use(counts: bool) -> None:
    """D41: 2 x 5 input tokens, 7 of them not hidden by the mask, whatever bears a loss, or a budget counts."""
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    x = torch.zeros(2, 5, dtype=torch.long)
    batch = {"x": x, "labels": torch.where(mask.bool() & (torch.arange(5) > 1), 1, -100), "attention_mask": mask}
    clock = Clock()
    made = monitor(clock)
    budget = ChinchillaBudget(tokens=6, count=lambda batch: 2, landing="ceil", save=False)
    fit(Timed(clock, [1.0] * 3), [batch] * 3, made, *[budget] * counts)
    assert made.total.tokens_per_second == 10.0
    assert made.total.nonpad_tokens_per_second == 7.0
    assert made.total.mfu == FLOPS_PER_TOKEN * 10 / PEAK
    assert made.total.goodput == 0.7


@pytest.mark.parametrize("optimizer", [None, fused_adamw], ids=["waits", "one step late"])
@pytest.mark.parametrize("labels_after", [10, 5, 1])
@pytest.mark.parametrize("labels_skipped", [10, 4])
def test_a_skipped_step_is_waste_whatever_labels_it_and_the_next_have(
    labels_skipped: int, labels_after: int, optimizer: Any
) -> None:
    """Seven of eight steps of as many tokens are made, and none of the tokens is padding."""
    rows = []
    for labels in (10, labels_skipped, labels_after, *[10] * 5):
        x = torch.arange(1, 11).view(1, 10)
        rows.append([x, torch.where(torch.arange(10) < labels, x, -100)])
    clock = Clock()
    made = monitor(clock)
    plugin = AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=1.0))
    fit(Timed(clock, [1.0] * 8, optimizer, overflows=(1,)), rows, made, plugin=plugin)
    assert (made.throughput.totals.input_tokens, made.throughput.totals.useful_tokens) == (80, 70)
    assert made.state_dict()["useful_tokens"] == 70


def test_what_a_budget_trims_is_no_padding() -> None:
    """The rows end in tokens that repeat, all of them labelled; the last four labels of the run are trimmed."""
    row = torch.tensor([[1, 2, 3, 7, 7, 7, 7, 7]])
    clock = Clock()
    made = monitor(clock)
    budget = ChinchillaBudget(tokens=20, save=False)
    fit(Timed(clock, [1.0] * 4), [[row, row.clone()] for _ in range(4)], made, budget, max_epochs=-1)
    assert (made.throughput.totals.input_tokens, made.throughput.totals.useful_tokens) == (24, 24)


@pytest.mark.parametrize("optimizer", [None, fused_adamw], ids=["waits", "one step late"])
@pytest.mark.parametrize("ours", [True, False])
def test_skipped_steps_are_waste(ours: bool, optimizer: Any) -> None:
    """Windows of 5, 10, 15, 20 and 25 tokens; the third and the last are skipped."""
    clock = Clock()
    made = monitor(clock)
    scaler = LossScaler(init_scale=1.0)
    plugin = AutocastPrecision("16-mixed", scaler=scaler) if ours else None
    if plugin is None:
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = quiet_trainer(callbacks=[made, OverflowMonitor()], plugins=[plugin])
    module = Timed(clock, [1.0] * 5, optimizer, overflows=(2, 4))
    trainer.fit(module, loader(batches([1, 2, 3, 4, 5])))
    totals = made.throughput.totals
    assert (totals.input_tokens, totals.useful_tokens) == (75, 75 - 15 - 25)
    assert made.total.goodput == 35 / 75
    assert made.total.tokens_per_second == 70 / 4


def test_a_trimmed_last_window_and_a_shared_counter() -> None:
    clock = Clock()
    made, budget = monitor(clock), ChinchillaBudget(tokens=25)
    fit(Timed(clock, [1.0] * 9), batches([2] * 9), budget, made, max_epochs=-1)
    assert budget.tokens_seen == 25
    assert made.throughput.totals.input_tokens == 30


# -- what a token costs ------------------------------------------------------------------------------------------------


class Checkpointed(Timed):
    """Two more matrices that run again in backward; the second not, as backward does not need what it makes."""

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        super().__init__(clock, seconds)
        self.block = nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.now += next(self.seconds)
        x, y = batch
        hidden = checkpoint(self.block, self.embedding(x), use_reentrant=False)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


@pytest.mark.parametrize(("given", "model"), [("exact", 6 * (88 + 256)), ("6N", 6 * (88 + 256)), (1000, 1000)])
def test_hfu_adds_what_is_run_again(given: Any, model: int) -> None:
    clock = Clock()
    made = monitor(clock, flops_per_token=given)
    fit(Checkpointed(clock, [1.0] * 3), batches([2] * 3), made)
    assert made.total.mfu == pytest.approx(model * 10 / PEAK, rel=1e-12)
    assert made.total.hfu == pytest.approx((model + 2 * 128) * 10 / PEAK, rel=1e-12)


def test_the_live_count_is_the_count_of_the_module() -> None:
    made, _, _ = train([1.0] * 2, [3] * 2)
    module, batch = TokenModel(), batches([3])[0]
    with FlopTally() as tally:
        sum_of_outputs(module.training_step(batch, 0)).backward()
    assert made.flop_count == tally.count


PLUGINS = {
    "bf16 autocast": (lambda: {"plugins": [AutocastPrecision("bf16-mixed")]}, "bf16"),
    "fp16 autocast": (lambda: {"plugins": [AutocastPrecision("16-mixed")]}, "fp16"),
    "masters": (lambda: {"plugins": [MasterWeightsPrecision("bf16-true")]}, "bf16"),
    "stock bf16-mixed": (lambda: {"precision": "bf16-mixed"}, "bf16"),
    "stock bf16-true": (lambda: {"precision": "bf16-true"}, "bf16"),
    "stock 64-true": (lambda: {"precision": "64-true"}, "fp64"),
    "stock 32-true": (lambda: {"precision": "32-true"}, "fp32"),
}


class OwnPlugin(pl.plugins.Precision):
    """A user's plugin, whose name says nothing."""

    precision: Any = "mine"

    def forward_context(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("name", [*PLUGINS, "own"])
def test_the_format_is_that_of_the_products_under_any_plugin(name: str) -> None:
    """D40: custom plugins were taken for fp32."""
    arguments, expected = PLUGINS[name] if name != "own" else (lambda: {"plugins": [OwnPlugin()]}, "bf16")
    made, _, _ = train([1.0] * 2, [3] * 2, **arguments())
    assert made.flop_count is not None
    assert made.flop_count.main_format == expected


def test_the_peak_of_a_known_device_in_the_format_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(hardware, "peak_flops", lambda *question: asked.append(question) or 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A40")
    device = torch.device("cuda")
    assert hardware.device_peak(device, "bf16-mixed", None)[0] == 1e9
    hardware.device_peak(device, "32-true", None)
    with tf32_matmuls_and_convolutions():
        hardware.device_peak(device, "32-true", None)
        hardware.device_peak(device, "bf16-mixed", "fp32")
    formats = ["bf16", "fp32", "tf32", "tf32"]
    assert asked == [("NVIDIA A40", number_format) for number_format in formats]


def test_without_a_peak_it_is_said_once_and_the_rest_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr("lightning_mp.callbacks.mfu_monitor.rank_zero_info", messages.append)
    made, rows, _ = train([1.0] * 4, [2] * 4, arguments={"peak_flops": None})
    assert set(rows[-1]) == {"tokens_per_second", "nonpad_tokens_per_second", "goodput"}
    assert made.total.mfu is None
    said = [message for message in messages if "neither MFU nor HFU" in message]
    assert len(said) == 1
    assert "no peak is known for the device 'cpu'. Give it: MFUMonitor(peak_flops=...)." in said[0]
    assert "MFUMonitor: 528 FLOPs per token (exact)." in messages
    assert messages[-1] == "MFUMonitor, whole run: 10 tokens/s, 10 of them without padding, goodput 100.0%."


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_totals_survive_a_resume(tmp_path: Any) -> None:
    """D41: 4 steps of 1 s, then 3 of 2 s; each leg warms up with its first."""
    path = tmp_path / "half.ckpt"
    _, _, trainer = train([1.0] * 4, [2] * 4)
    trainer.save_checkpoint(path)
    clock = Clock()
    made = monitor(clock)
    resumed = quiet_trainer(callbacks=[made], max_epochs=2)
    resumed.fit(Timed(clock, [2.0] * 4), loader(batches([2] * 4)), ckpt_path=path, weights_only=False)
    totals = made.throughput.totals
    assert totals.input_tokens == 80
    assert (totals.timed_input_tokens, totals.seconds) == (30 + 30, 3.0 + 6.0)
    assert made.total.mfu == pytest.approx(FLOPS_PER_TOKEN * 60 / (PEAK * 9), rel=1e-12)


def test_a_checkpoint_knows_that_the_step_before_it_was_skipped(tmp_path: Any) -> None:
    """The monitor saves before the callback that brings outcomes does, and a fused optimizer tells of them late."""
    path = tmp_path / "skipped.ckpt"
    clock = Clock()
    made = monitor(clock)
    callbacks = [
        made,
        OverflowMonitor(),
        pl.callbacks.LambdaCallback(
            on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(path) if trainer.global_step == 3 else None
        ),
    ]
    plugin = AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1.0))
    module = Timed(clock, [1.0] * 5, fused_adamw, overflows=(2,))
    fit(module, batches([2] * 5), callbacks=callbacks, plugin=plugin)
    saved = torch.load(path, weights_only=True)["callbacks"]["MFUMonitor"]
    assert (saved["input_tokens"], saved["useful_tokens"]) == (30, 20)


def test_a_checkpoint_in_between_changes_nothing(tmp_path: Any) -> None:
    saves = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    made, _, _ = train([1.0] * 5, [2] * 5, saves, enable_checkpointing=True)
    totals = made.throughput.totals
    assert (totals.timed_input_tokens, totals.seconds, totals.useful_tokens) == (40, 4.0, 50)


# -- costs, endings, refusals ------------------------------------------------------------------------------------------


def test_after_an_exception_nothing_counts_and_nothing_is_in_the_way() -> None:
    class Breaks(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("planted")

    clock = Clock()
    made = monitor(clock)
    with pytest.raises(RuntimeError, match="planted"):
        fit(Breaks(clock, [1.0]), batches([1]), made)
    torch.ones(2, 2) @ torch.ones(2, 2)
    assert made._fit is None


def test_time_between_a_fit_that_failed_and_the_next_is_not_counted() -> None:
    class Breaks(Timed):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise RuntimeError("planted")

    clock = Clock()
    made = monitor(clock)
    with pytest.raises(RuntimeError, match="planted"):
        fit(Breaks(clock, [1.0] * 3), batches([2] * 3), made)
    clock.now += 1000.0
    fit(Timed(clock, [1.0] * 3), batches([2] * 3), made)
    assert made.throughput.totals.seconds == 1.0 + 2.0


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_operations_of_an_earlier_fit_are_not_those_of_compiled_code() -> None:
    """What it runs again cannot be counted, so there is no HFU."""
    clock = Clock()
    made = monitor(clock, flops_per_token="6N")
    fit(Timed(clock, [1.0] * 3), batches([2] * 3), made)
    assert made.throughput.work.hardware_flops_per_token is not None
    compiled = Timed(clock, [1.0] * 3)
    compiled.head.compile(backend="eager")
    fit(compiled, batches([2] * 3), made)
    assert made.throughput.work.model_flops_per_token is not None
    assert made.throughput.work.hardware_flops_per_token is None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_micro_batch_without_a_loss_is_not_the_one_that_counts() -> None:
    class SkipsFirst(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    clock = Clock()
    made = monitor(clock)
    fit(SkipsFirst(clock, [1.0] * 4), batches([2] * 5), made)
    assert made.throughput.work.model_flops_per_token == FLOPS_PER_TOKEN


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_code_cannot_be_counted_and_is_refused() -> None:
    class Compiled(TokenModel):
        def __init__(self) -> None:
            super().__init__()
            self.head.compile()

    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="cannot see into code compiled by"):
        fit(Compiled(), batches([1]), MFUMonitor())
    # Conventions count per token, and are refused for samples.
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match=r"\.model / samples\)\.$"):
        fit(Compiled(), batches([1]), MFUMonitor(unit="sample"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_modules_that_are_lent_weights_are_compiled_only_if_torch_compile_was_called(is_compiled: bool) -> None:
    """MasterWeightsPrecision intercepts calls where ``Module.compile`` puts compiled code."""
    clock = Clock()
    made = monitor(clock, flops_per_token="6N")
    module = Timed(clock, [1.0] * 3)
    if is_compiled:
        module.head.compile(backend="eager")
    fit(module, batches([2] * 3), made, plugin=MasterWeightsPrecision("bf16-true"))
    assert (made.throughput.work.hardware_flops_per_token is None) == is_compiled


def pictures() -> Trained:
    """Batches of x, or of [x, y]."""
    return Trained(
        lambda module, batch: module.layer(batch[0] if isinstance(batch, list) else batch).mean(),
        layer=lambda: nn.Linear(4, 1),
    )


PICTURES = [[torch.ones(3, 4), torch.ones(3)]] * 3


def test_a_batch_without_tokens_is_refused_and_samples_can_be_counted() -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="to its number of tokens, or unit"):
        fit(pictures(), PICTURES, MFUMonitor())
    for arguments in ({"unit": "sample"}, {"count": lambda batch: len(batch[0])}):
        logger = MemoryLogger()
        made = MFUMonitor(peak_flops=PEAK, **arguments)
        fit(pictures(), PICTURES, made, logger=logger, log_every_n_steps=1)
        assert made.throughput.work.model_flops_per_token == 2 * 4 * 2  # the input needs no gradient
        assert made.throughput.totals.input_tokens == 9
        _, last = logger.ours()[-1]
        assert "samples_per_second" in last, "what counts samples is called samples"
        assert not any("tokens_per_second" in name for name in last)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"count": len},
            r"gives 2 for the first batch, of type 'list' with 3 samples, or 3 to 12 tokens. Count .*len\(batch\[0\]\)",
        ),
        ({"count": lambda batch: 13}, "gives 13 for the first batch"),
        ({"count": lambda batch: 3, "flops_per_token": "6N"}, "'6N'.: this convention counts per token"),
        ({"count": lambda batch: 12, "unit": "sample"}, "gives 12 for the first batch, of type 'list' with 3 samples"),
    ],
)
def test_a_count_that_can_be_neither_tokens_nor_samples_is_refused(arguments: Any, message: str) -> None:
    """Seen: ``count=len`` on ``[x, y]`` counted 2 whatever the batch, and gave 15 tokens a second."""
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match=message):
        fit(pictures(), PICTURES, MFUMonitor(**arguments))


def test_what_is_counted() -> None:
    """A batch of one dimension can be one of tokens, some of them padding; labels are tokens."""
    stream = torch.zeros(50, dtype=torch.long)
    assert counted_unit("token", 40, stream, is_counted=True) == "token"
    assert counted_unit("token", 50, stream, is_counted=True) == "token"
    assert counted_unit("auto", 50, stream, is_counted=True) == "sample"
    labels = {"labels": torch.zeros(2, 5, dtype=torch.long)}
    assert counted_unit("auto", 10, labels, is_counted=True) == "token"
    assert counted_unit("auto", 10, labels, is_counted=False) == "token"
    assert counted_unit("auto", 2, labels, is_counted=True) == "sample"
    assert counted_unit("sample", 2, labels, is_counted=True) == "sample"
    assert counted_unit("token", 1, labels, is_counted=True) == "token"
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="with unit='sample' or unit='token'"):
        counted_unit("auto", 1, labels, is_counted=True)
    assert counted_unit("auto", 7, "no tensor", is_counted=True) == "token"


def test_samples_that_are_no_rows_are_what_the_user_says() -> None:
    refused = pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="`count` gives")
    images = [torch.zeros(3, 8, 8)] * 4
    assert counted_unit("sample", 4, images, is_counted=True) == "sample"
    for unit in ("auto", "sample"):  # two images beside two mappings
        assert counted_unit(unit, 2, (images[:2], [{"boxes": torch.zeros(1, 4)}] * 2), is_counted=True) == "sample"
    graphs = {"x": torch.zeros(9, 3), "y": torch.zeros(2), "ptr": torch.zeros(3)}
    assert counted_unit("sample", 2, graphs, is_counted=True) == "sample"
    assert counted_unit("sample", 3, graphs, is_counted=True) == "sample"  # of its entries; `ptr` has as many rows
    with refused:
        counted_unit("sample", 3, {**graphs, "ptr": None}, is_counted=True)  # `len` of it
    with refused:
        counted_unit("auto", 2, graphs, is_counted=True)
    with refused:
        counted_unit("sample", 0, graphs, is_counted=True)
    with refused:
        counted_unit("sample", 5, images, is_counted=True)


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    yield
    assert get_current_dispatch_mode() is None


@pytest.mark.parametrize("arguments", [{"max_steps": 1}, {"fast_dev_run": True}])
def test_a_run_of_the_warm_up_alone_has_no_rates(arguments: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Seen: "whole run: 0 tokens/s, MFU 0.0%"."""
    monitor = MFUMonitor(peak_flops=PEAK)
    with caplog.at_level("INFO"):
        trainer = fit(TokenModel(), token_batches([5, 5]), monitor, **arguments)
    total = monitor.total
    assert (total.tokens_per_second, total.mfu, total.hfu, total.goodput) == (None, None, None, 1.0)
    assert "whole run" not in caplog.text
    assert "mp/mfu" not in trainer.callback_metrics
