"""Moments in bf16 of torch's fused Adam and AdamW: equal to fp32 moments that are rounded after each step."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsdp2_runs as runs
import pytest
import torch
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from optimizer_packages import PRECISIONS, Net, Row, batches, fit, outcomes
from small_models import Regression, loader, quiet_trainer, regression_batches
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from lightning_mp import AutocastPrecision, JointOptimizer, bf16_moments, estimate_memory, matrices_and_rest
from lightning_mp.training.gradients import step_blocks
from lightning_mp.training.optimizers import adam_moments

_OPERATIONS = ("_fused_adam_", "_fused_adamw_")


@contextmanager
def kernels(steps: list[int] | None = None) -> Iterator[None]:
    """While this is entered, bf16 moments are allowed on a CPU; ``steps`` gets how many parameters each call steps."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s)Warning only once for all operators")
        for name in _OPERATIONS:
            library.impl(name, _kernel(name, steps), "CPU", with_keyset=True, allow_override=True)
    try:
        with patch.object(adam_moments, "_DEVICES", {"cpu"}):
            yield
    finally:
        library._destroy()


def _kernel(name: str, steps: list[int] | None) -> Any:
    stock = torch.library.get_kernel(f"aten::{name}", "CPU")

    def step(
        keys: Any, parameters: Any, gradients: Any, exp_avgs: Any, exp_avg_sqs: Any, *rest: Any, **settings: Any
    ) -> None:
        if steps is not None:
            steps.append(len(parameters))
        moments = [[moment.float() for moment in moments] for moments in (exp_avgs, exp_avg_sqs)]
        stock.call_boxed(keys, parameters, gradients, *moments, *rest, **settings)
        for stored, new in zip([*exp_avgs, *exp_avg_sqs], [*moments[0], *moments[1]], strict=True):
            stored.copy_(new)

    return step


def moments_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of Adam; others may share its state."""
    return [v for state in optimizer.state.values() for key, v in state.items() if key in ("exp_avg", "exp_avg_sq")]


def rounded_moments(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The reference: fp32 moments, which a hook rounds to bf16 after each step."""

    def round_them(*_: Any) -> None:
        for moment in moments_of(optimizer):
            moment.copy_(moment.bfloat16())

    optimizer.register_step_post_hook(round_them)
    return optimizer


needs_kernel = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch has no kernel for bf16 moments before 2.12")
SETTINGS: dict[str, Any] = {"betas": (0.9, 0.95), "fused": True}
PLAIN = Row("torch", "torch.optim", "AdamW", {"lr": 1e-2, **SETTINGS})
BF16, ROUNDED = replace(PLAIN, wrap=bf16_moments), replace(PLAIN, wrap=rounded_moments)
Wrap = Callable[[Any], Any]


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """With the kernels on the CPU: how many parameters each call steps."""
    found: list[int] = []
    with kernels(found):
        yield found


def dtypes(optimizer: Optimizer) -> set[torch.dtype]:
    return {moment.dtype for moment in moments_of(optimizer)}


def stepped(kind: type[Adam], wrap: Wrap, settings: dict[str, Any], device: str = "cpu") -> tuple[nn.Module, Optimizer]:
    """Six steps; the last layer has a gradient from the third on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(device, memory_format=torch.preserve_format)
    groups = [{"params": list(net[0].parameters()), "lr": 3e-2}, {"params": list(net[1].parameters())}]
    optimizer = wrap(kind(groups, **{**SETTINGS, **settings}))
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for parameter in (net if step > 1 else net[0]).parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


VARIANTS = {
    "AdamW": (AdamW, {"weight_decay": 0.1}),
    "Adam": (Adam, {"weight_decay": 0.1}),
    "maximize": (AdamW, {"maximize": True}),
}


@needs_kernel
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_fp32_moments_that_are_rounded_after_each_step(name: str, steps: list[int]) -> None:
    kind, settings = VARIANTS[name]
    net, optimizer = stepped(kind, bf16_moments, settings)
    reference, _ = stepped(kind, rounded_moments, settings)
    assert all(map(torch.equal, net.parameters(), reference.parameters()))
    assert dtypes(optimizer) == {torch.bfloat16}
    fp32, _ = stepped(kind, lambda optimizer: optimizer, settings)
    assert not torch.equal(next(net.parameters()), next(fp32.parameters())), "rounding shows"


@needs_kernel
@pytest.mark.gpu
def test_the_kernel_of_a_gpu_equals_fp32_moments_that_are_rounded() -> None:
    net, optimizer = stepped(AdamW, bf16_moments, {}, "cuda")
    reference, _ = stepped(AdamW, rounded_moments, {}, "cuda")
    assert dtypes(optimizer) == {torch.bfloat16}
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        # Fused multiply-adds may round a moment to the neighbouring bf16 number, 2^-8 of a step of at most 0.03.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=6 * 0.03 * 2**-8)


@needs_kernel
@pytest.mark.parametrize("precision", PRECISIONS)
def test_trains_clips_skips_and_resumes_in_each_precision(precision: str, steps: list[int], tmp_path: Path) -> None:
    found = dict(outcomes(BF16, precision, tmp_path))
    if precision == "24bit masters":  # whose stochastic rounding depends on the number of the step
        del found["skip"]
    assert set(found.values()) == {True}, found
    [states] = torch.load(tmp_path / "half.ckpt", weights_only=True)["optimizer_states"]
    assert {states["state"][0][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    settings = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "overflow_at": 3}
    assert all(
        map(torch.equal, fit(BF16, precision, batches(), **settings), fit(ROUNDED, precision, batches(), **settings))
    )


@needs_kernel
def test_stock_lightning_evaluates_the_loss_inside_of_the_step(steps: list[int]) -> None:
    """Before it there are no gradients by which to tell which parameters are trained."""
    found = []
    for row in (BF16, ROUNDED):
        module = Net(row, None)
        trainer = quiet_trainer()
        trainer.fit(module, loader(batches()))
        found.append((module.weights(), dtypes(trainer.optimizers[0])))
    (ours, moments), (reference, _) = found
    assert moments == {torch.bfloat16}
    assert all(map(torch.equal, ours, reference))


@needs_kernel
@pytest.mark.parametrize("precision", ["fp16 autocast", "remainder masters"])
def test_a_checkpoint_may_have_moments_of_the_other_dtype(precision: str, steps: list[int], tmp_path: Path) -> None:
    """fp32 moments are rounded; bf16 ones are fp32 numbers."""
    half = tmp_path / "half.ckpt"
    fit(PLAIN, precision, batches(), save_to=half)
    from_fp32 = fit(BF16, precision, batches(), ckpt_path=half)
    checkpoint = torch.load(half, weights_only=True)
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state.update({name: state[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")})
    torch.save(checkpoint, half)
    assert all(map(torch.equal, from_fp32, fit(BF16, precision, batches(), ckpt_path=half)))
    as_fp32 = fit(PLAIN, precision, batches(), ckpt_path=half)  # the kernel would refuse bf16 moments beside fp32 ones
    assert all(bool(weight.isfinite().all()) for weight in as_fp32)


@needs_kernel
def test_masters_step_block_by_block(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other people's step hooks have to see all parameters at once."""
    monkeypatch.setattr(step_blocks, "_SMALLEST_BLOCK", 1)
    weights = fit(BF16, "remainder masters", batches())
    assert set(steps) == {1}
    assert all(map(torch.equal, weights, fit(ROUNDED, "remainder masters", batches())))


@needs_kernel
def test_an_average_of_weights_leaves_out_a_skipped_step(steps: list[int]) -> None:
    found = []
    for row in (BF16, ROUNDED):
        module, average = Net(row, 3), WeightAveraging()
        quiet_trainer(plugins=[PRECISIONS["fp16 autocast"]()], callbacks=[average]).fit(module, loader(batches()))
        found.append(module.weights())
    assert all(map(torch.equal, *found))


class Sharded(runs.Recorded):
    wrap: Wrap

    def configure_optimizers(self) -> Any:
        matrices, rest = matrices_and_rest(self)
        adamw = self.wrap(AdamW(rest, lr=1e-2, eps=1e-3, **SETTINGS))
        return JointOptimizer([Muon(matrices, lr=1e-2), adamw], module=self)


def sharded(wrap: Wrap) -> Sharded:
    torch.manual_seed(0)
    module = Sharded(layers=1, heads=2, width=16, block_tokens=runs.TOKENS, vocab=runs.VOCABULARY)
    module.wrap = wrap
    return module


@needs_kernel
@pytest.mark.parametrize(
    ("whole", "precision"),
    [(False, "fp16 autocast"), (True, "fp16 autocast"), (False, "remainder masters")],
    ids=["shards", "single file", "masters"],
)
def test_shards_resume_on_any_number_of_ranks_and_beside_muon(whole: bool, precision: str, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"

    def train(rank: int, ranks: int, wrap: Wrap = bf16_moments, **settings: Any) -> dict[str, Tensor]:
        strategy = runs.fsdp2(save_distributed_checkpoint=not whole)
        with kernels():
            module = sharded(wrap)
            plugin = PRECISIONS[precision]()
            found = runs.train(rank, ranks, strategy, module=module, plugin=plugin, gradient_clip_val=0.5, **settings)
            assert dtypes(module.trainer.optimizers[0].optimizers[1]) == {
                torch.bfloat16 if wrap is bf16_moments else torch.float32
            }
        return found["weights"]

    def on_two(rank: int) -> list[dict[str, Tensor]]:
        reference, straight = train(rank, 2, rounded_moments, steps=6), train(rank, 2, steps=6)
        train(rank, 2, steps=3, save_to=path)
        return [reference, straight, train(rank, 2, steps=6, ckpt_path=path)]

    for found in run_ranks(on_two, 2):
        for one, other in pairwise(found):
            assert all(torch.equal(one[name], value) for name, value in other.items())

    def on_four(rank: int) -> list[dict[str, Tensor]]:
        return [train(rank, 4, wrap, steps=6, ckpt_path=path) for wrap in (bf16_moments, rounded_moments)]

    for ours, reference in run_ranks(on_four, 4):
        assert all(torch.equal(reference[name], value) for name, value in ours.items())


@needs_kernel
def test_an_estimate_of_memory_has_four_bytes_per_parameter_less() -> None:
    module, batch = nn.Linear(64, 64), torch.ones(2, 64)

    def states(wrap: Wrap) -> int:
        estimate = estimate_memory(
            module,
            batch,
            lambda module, batch: module(batch).sum(),
            precision="bf16-true+remainder",
            optimizer=lambda parameters: wrap(AdamW(parameters, **SETTINGS)),
        )
        return estimate.peak.bytes_by_part["optimizer states"]

    numel = sum(p.numel() for p in module.parameters())
    assert states(lambda optimizer: optimizer) - states(bf16_moments) == 4 * numel


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, dtype=dtype))]


def after_a_step() -> Optimizer:
    optimizer = AdamW(weights(), **SETTINGS)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    return optimizer


@needs_kernel
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(weights()), r"bf16_moments\(SGD\): only Adam and AdamW of torch.optim"),
        (lambda: AdamW(weights(), betas=(0.9, 0.95)), "only the fused kernel takes bf16 moments. Make it with fused"),
        (lambda: AdamW(weights(), amsgrad=True, **SETTINGS), r"bf16_moments\(AdamW\(amsgrad=True\)\): it keeps two"),
        (lambda: AdamW(weights(), fused=True), r"the second beta is 0.999. .* \(at 0.999 each is\)"),
        (after_a_step, "the optimizer has moments already. Call it before the first step"),
    ],
)
def test_what_has_no_kernel_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bf16_moments(make())


def test_second_moments_decrease_with_the_largest_beta_and_not_with_the_default() -> None:
    numbers = 1 + torch.arange(128) / 128
    assert bool(((numbers * adam_moments._MAX_BETA2).bfloat16() < numbers).all())
    assert bool(((numbers * 0.999).bfloat16() == numbers).all())


def test_older_releases_of_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(MisconfigurationException, match=r"torch 2.11.0\+cu130 has no kernel .* torch 2.12 has"):
        bf16_moments(AdamW(weights(), **SETTINGS))


class OnCpu(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("refused too late")

    def configure_optimizers(self) -> Any:
        return JointOptimizer([bf16_moments(AdamW(self.parameters(), **SETTINGS))])


@needs_kernel
def test_a_device_without_the_kernel_is_refused_at_set_up_or_in_the_first_step() -> None:
    trainer = quiet_trainer(plugins=[AutocastPrecision("bf16-mixed")], max_steps=1)
    with pytest.raises(MisconfigurationException, match="AdamW with bf16_moments has parameters on cpu, .* CUDA only"):
        trainer.fit(OnCpu(), loader(regression_batches(1)))
    optimizer = bf16_moments(AdamW(weights(), **SETTINGS))
    optimizer.step()  # nothing to step
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    with pytest.raises(MisconfigurationException, match="Leave bf16_moments out on other devices"):
        optimizer.step()


@needs_kernel
def test_parameters_of_another_dtype_are_refused(steps: list[int]) -> None:
    optimizer = bf16_moments(AdamW(weights(torch.float16), **SETTINGS))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2, dtype=torch.float16)
    with pytest.raises(ValueError, match="has torch.float16 parameters, and the kernel takes fp32 ones"):
        optimizer.step()
