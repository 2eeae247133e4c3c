"""DDP's gradients reduced in 16 bit: error, bytes, overflow, and whole runs by name; two to four real processes."""

import pickle
import time
from typing import Any, Generic, TypeVar

import pytest
import small_models
import torch
import torch.distributed as dist
from gloo import on_ranks, process_group
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, adamw, fused_adamw, loader, quiet_trainer, regression_batches, sgd, weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, MasterWeightsPrecision, OverflowMonitor
from lightning_mp.strategies import ReducedPrecisionDDPStrategy
from lightning_mp.training.gradients.comm_hook import reduced_precision_hook

DTYPES = [torch.bfloat16, torch.float16]
T = TypeVar("T")
BATCHES = {rank: regression_batches(14)[7 * rank : 7 * rank + 7] for rank in (0, 1)}


class Reductions(TorchDispatchMode):
    """Every all-reduce of gradients, DDP's own ones too; the epilogue's vector is float64, DDP's set-up integers."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allreduce" in str(func) and args[0][0].dtype in (torch.float32, *DTYPES):
            self.dtypes.append(args[0][0].dtype)
            self.bytes += args[0][0].nbytes
        return func(*args, **(kwargs or {}))


def reduce_one(gradient: Tensor, hook: Any, **arguments: Any) -> tuple[Tensor, Reductions]:
    """What DDP makes of a gradient per rank."""
    model = nn.Linear(gradient.numel(), 1, bias=False)
    wrapped = DistributedDataParallel(model, **arguments)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    with Reductions() as seen:
        wrapped(gradient[None]).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad[0], seen


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_error_is_within_the_stated_bound(world_size: int) -> None:
    """Against float64; magnitudes from subnormal fp16 to near its end."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-26, 14, (world_size, 4096), generator=generator)
    gradients = torch.randn(world_size, 4096, generator=generator) * 2.0**exponents

    def reduce(rank: int) -> list[Tensor]:
        with process_group():
            return [reduce_one(gradients[rank], reduced_precision_hook(dtype))[0] for dtype in DTYPES]

    results = run_ranks(reduce, world_size)
    exact, mean_size = gradients.double().mean(0), gradients.double().abs().mean(0)
    for index, (unit, subnormal) in enumerate([(2.0**-8, 0.0), (2.0**-11, 2.0**-25)]):
        ours = results[0][index].double()
        assert all(torch.equal(other[index], results[0][index]) for other in results)
        gamma = world_size * unit / (1 - world_size * unit)
        bound = gamma * mean_size + world_size * subnormal
        error = (ours - exact).abs()
        assert (error <= bound * (1 + 1e-6)).all()
        # The bound is not idle: 16 bit was really used.
        assert (error / bound).max() > 0.25


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "bucket view"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_half_the_bytes_are_on_the_wire(dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    def reduce(rank: int) -> Any:
        with process_group():
            gradient = torch.arange(64.0) * (rank + 1)
            plain, fp32 = reduce_one(gradient, None, **arguments)
            ours, half = reduce_one(gradient, reduced_precision_hook(dtype), **arguments)
            assert half.dtypes == [dtype]
            return plain, ours, fp32.bytes, half.bytes

    for plain, ours, fp32_bytes, half_bytes in run_ranks(reduce, 2):
        assert torch.equal(plain, ours)
        assert half_bytes * 2 == fp32_bytes == 64 * 4


def test_16_bit_gradients_are_reduced_as_they_are() -> None:
    def reduce_half() -> Any:
        model = nn.Linear(4, 1, bias=False).half()
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, reduced_precision_hook("bf16"))
        with Reductions() as seen:
            wrapped(torch.full((1, 4), 1.0 + 2.0**-10, dtype=torch.float16)).sum().backward()
        return seen.dtypes, model.weight.grad

    def reduce(rank: int) -> Any:
        with process_group():
            # A function of its own: DDP must not outlive the group. The one that lets go of it last joins its threads,
            # and holding Python's lock for that hangs where a thread still has a hook of ours to drop.
            return reduce_half()

    for dtypes, gradient in run_ranks(reduce, 2):
        assert dtypes == [torch.float16]
        assert gradient.tolist() == [[1.0 + 2.0**-10] * 4]


def test_fp16_overflows_only_where_the_mean_does_and_everywhere_alike() -> None:
    """torch's own hook casts before it divides, so 99,968 on one rank is inf there."""
    gradients = torch.tensor(
        [[99968.0, 1e5, torch.inf, torch.nan, torch.inf, 1.0], [0.0, 1e5, 1.0, 1.0, -torch.inf, 1.0]]
    )

    def reduce(rank: int) -> list[Tensor]:
        with process_group():
            hooks = [reduced_precision_hook("fp16"), fp16_compress_hook]
            return [reduce_one(gradients[rank], hook)[0] for hook in hooks]

    for ours, torchs in run_ranks(reduce, 2):
        assert torch.isfinite(ours).tolist() == [True, False, False, False, False, True]
        assert ours[0] == 99968.0 / 2
        assert torchs[0].isinf()


def test_gloo_is_left_no_callback_of_python() -> None:
    """D67. Its threads would still need Python's lock when DDP or the interpreter ends: wait instead."""

    def reduced_on_return(rank: int) -> bool:
        model = nn.Linear(4, 1, bias=False)
        done: list[bool] = []

        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            time.sleep(0.3 * rank)  # the others cannot be done before this one has begun
            future = reduced_precision_hook("bf16")(state, bucket)
            done.append(future.done())
            return future

        hook.__annotations__ = reduced_precision_hook("bf16").__annotations__
        with process_group():
            wrapped = DistributedDataParallel(model)
            wrapped.register_comm_hook(None, hook)
            wrapped(torch.ones(1, 4)).sum().backward()
        return done == [True]

    assert run_ranks(reduced_on_return, 2) == [True, True]


@pytest.mark.parametrize(
    ("backends", "waits"),
    [
        ("cuda:nccl", False),
        ("cpu:gloo,cuda:nccl", False),
        pytest.param(
            "cpu:gloo,cuda:gloo",
            True,
            marks=pytest.mark.skipif(torch.version.cuda is None, reason="needs torch built for CUDA, and no device"),
        ),
    ],
)
def test_on_cuda_only_nccl_goes_on_by_itself(backends: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for torch's parts, as for the tensor: a future that is not told of the device refuses it."""
    told: list[Any] = []

    class Work:
        def wait(self) -> None:
            told.append("waited")

        def get_future(self) -> Any:
            return self

        def then(self, callback: Any) -> str:
            return "by itself"

    class Future(Generic[T]):
        def __init__(self, *, devices: Any = None) -> None:
            told.append(devices)

        def set_result(self, result: Tensor) -> None:
            self.result = result

    class Bucket:
        def buffer(self) -> Tensor:
            return torch.ones(4, device="cuda:0")

    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Work())
    monkeypatch.setattr(torch.futures, "Future", Future)
    with FakeTensorMode():
        reduced = reduced_precision_hook("bf16")(None, Bucket())
    assert told == (["waited", [torch.device("cuda", 0)]] if waits else [])
    assert (reduced == "by itself") is not waits


def fit(rank: int, strategy: Any, plugin: Any, optimizer: Any = fused_adamw, overflows: Any = (), **more: Any) -> Any:
    module, monitor = Regression(optimizer, overflows=overflows if rank == 1 else ()), OverflowMonitor()
    callbacks = [monitor, AccumulationScheduler({0: 3})]
    trainer = quiet_trainer(devices=2, strategy=strategy, plugins=[plugin], callbacks=callbacks, **more)
    with Reductions() as seen:
        trainer.fit(module, loader(BATCHES[rank]))
    scaler = trainer.precision_plugin.scaler
    return weights(module), monitor.skipped_steps, scaler.get_scale() if scaler is not None else 1.0, seen.dtypes


PLUGINS = {
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=256.0)),
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed"),
    "bf16-true": lambda: MasterWeightsPrecision("bf16-true"),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mp_ddp_bf16_reduce", "16-mixed"),
        ("mp_ddp_bf16_reduce", "bf16-mixed"),
        ("mp_ddp_bf16_reduce", "bf16-true"),
        ("mp_ddp_fp16_reduce", "16-mixed"),
    ],
)
@pytest.mark.full
def test_a_run_by_name_is_close_to_one_with_fp32_reduction(name: str, precision: str) -> None:
    """Windows of 3, 3 and 1 micro-batches, one rank overflows in the second; one reduction per window."""
    ours = run_ranks(lambda rank: fit(rank, name, PLUGINS[precision](), overflows=[4], gradient_clip_val=0.5), 2)
    expected = run_ranks(
        lambda rank: fit(rank, DDPStrategy(), PLUGINS[precision](), overflows=[4], gradient_clip_val=0.5), 2
    )[0]
    dtype = torch.float16 if "fp16" in name else torch.bfloat16
    for result in ours:
        assert result[1:3] == expected[1:3] == (1, 128.0 if precision == "16-mixed" else 1.0)
        assert result[3] == [dtype] * 3
        for a, b, c in zip(result[0], ours[0][0], expected[0], strict=True):
            assert torch.equal(a, b)
            assert torch.isfinite(a).all()
            # AdamW moves a weight by its learning rate, 1e-2, whatever the size of the gradient.
            torch.testing.assert_close(a, c, rtol=0, atol=2e-3)


@pytest.mark.full
def test_an_overflow_of_the_reduction_alone_lowers_the_scale_on_all_ranks() -> None:
    """The scaled gradients fit into fp32, not into fp16: steps are skipped until the mean fits."""

    def train(rank: int) -> Any:
        plugin = AutocastPrecision("bf16-mixed")
        plugin.scaler = LossScaler(init_scale=2.0**20)
        return fit(rank, ReducedPrecisionDDPStrategy("fp16", gradient_as_bucket_view=True), plugin, sgd, max_epochs=6)

    (first, skipped, scale, _), (second, *others) = run_ranks(train, 2)
    assert skipped > 0
    assert scale == 2.0 ** (20 - skipped)
    assert [skipped, scale] == others[:2]
    assert all(torch.isfinite(a).all() and torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], weights(Regression())[0])


@pytest.mark.full
def test_lightning_leaves_a_hook_out_on_the_cpu_and_the_strategy_does_not() -> None:
    """The reason for ReducedPrecisionDDPStrategy: when this fails, Lightning registers hooks everywhere."""
    stock = DDPStrategy(ddp_comm_hook=reduced_precision_hook(torch.bfloat16))
    assert run_ranks(lambda rank: fit(rank, stock, PLUGINS["bf16-mixed"]())[3], 2) == [[torch.float32] * 3] * 2
    ours = ReducedPrecisionDDPStrategy(torch.bfloat16)
    for dtypes in run_ranks(lambda rank: fit(rank, ours, PLUGINS["bf16-mixed"]())[3], 2):
        assert dtypes == [torch.bfloat16] * 3


@pytest.mark.gpu
def test_the_stock_strategy_takes_the_hook_on_cuda() -> None:
    """On one device the reduction is a rounding to 16 bit."""
    module = Regression(sgd)
    strategy = DDPStrategy(ddp_comm_hook=reduced_precision_hook(torch.bfloat16))
    seen: list[Tensor] = []
    module.on_after_backward = lambda: seen.extend(p.grad.clone() for p in module.parameters())  # type: ignore[union-attr]
    small_models.fit(module, BATCHES[0], plugin=AutocastPrecision("bf16-mixed"), accelerator="gpu", strategy=strategy)
    assert seen
    assert all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in seen)


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
# LightningCLI 2.6 calls what jsonargparse has given other names since (lightning/pytorch/cli.py); it still works.
@pytest.mark.filterwarnings(r"ignore:\s*By default only one JsonargparseDeprecationWarning per type:DeprecationWarning")
@pytest.mark.parametrize(
    "strategy",
    [
        "mp_ddp_bf16_reduce",
        "{class_path: lightning_mp.strategies.ReducedPrecisionDDPStrategy, init_args: {dtype: bf16}}",
    ],
    ids=["name", "class"],
)
def test_it_can_be_written_in_yaml(strategy: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = tmp_path / "config.yaml"
    config.write_text(
        f"trainer:\n  accelerator: cpu\n  strategy: {strategy}\n  plugins:\n"
        "  - class_path: lightning_mp.AutocastPrecision\n    init_args: {precision: bf16-mixed}\n"
    )
    cli = LightningCLI(
        Regression, args=["--config", str(config)], run=False, save_config_callback=None, seed_everything_default=False
    )
    assert isinstance(cli.trainer.strategy, ReducedPrecisionDDPStrategy)
    assert isinstance(cli.trainer.precision_plugin, AutocastPrecision)


def test_names_are_registered_with_a_description() -> None:
    for name, bits in (("mp_ddp_bf16_reduce", "bf16"), ("mp_ddp_fp16_reduce", "fp16")):
        assert StrategyRegistry[name]["description"] == f"DDP with gradients reduced over ranks in {bits}"


def test_the_hook_survives_pickling() -> None:
    for dtype in DTYPES:
        hook = reduced_precision_hook(dtype)
        assert pickle.loads(pickle.dumps(hook)) is hook


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("plugins", "found"),
    [
        ([], "no scaler"),
        ([AutocastPrecision("bf16-mixed")], "no scaler"),
        ([AutocastPrecision("16-mixed", scaler=LossScaler(enabled=False))], "no scaler"),
    ],
    ids=["none", "bf16-mixed", "disabled"],
)
@on_ranks(run_ranks, 2)
def test_fp16_without_a_scaler_is_refused(rank: int, plugins: Any, found: str) -> None:
    trainer = quiet_trainer(devices=2, strategy="mp_ddp_fp16_reduce", plugins=plugins)
    with pytest.raises(MisconfigurationException, match=rf"has {found}\): small .* Use AutocastPrecision\('16-mixed'"):
        trainer.fit(Regression(adamw), loader(BATCHES[rank]))
