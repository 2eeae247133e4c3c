"""The functions over gradients against double precision, on every dtype, odd shapes and lists that mix them."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp.ground.core.devices import accumulation_dtype, sent_to
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.gradients.fused_optimizers import fused_step
from lightning_mp.training.gradients.replication import GradientReplication

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = {
    "scalar": [()],
    "one element": [(1,)],
    "empty beside others": [(0,), (3,), (2, 0, 4)],
    "odd shapes": [(7,), (3, 5), (), (1, 2, 3), (257,)],
    "large": [(300, 301)],
}
# Two roundings of a number that the format holds exactly at best.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6, torch.float64: 1e-14}


def a_list(shapes, dtype, scale=1.0):
    return [(torch.randn(shape, dtype=torch.float64) * scale).to(dtype) for shape in shapes]


def a_mixed_list():
    """Every dtype, a scalar, an empty tensor and one that is not contiguous, in an order that no grouping keeps."""
    return [
        torch.randn(3, dtype=torch.float32),
        torch.randn(4, 5, dtype=torch.float16),
        torch.randn((), dtype=torch.float64),
        torch.randn(0, 3, dtype=torch.bfloat16),
        torch.randn(6, 4).t(),
        torch.randn(5, dtype=torch.bfloat16),
        torch.randn(2, dtype=torch.float16),
    ]


def exact_norms(tensors):
    return torch.stack([t.double().flatten().square().sum().sqrt() for t in tensors])


lists = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_parameters_come_in_the_order_of_their_groups_and_only_with_a_gradient():
    a, b, c, d = (nn.Parameter(torch.ones(2)) for _ in range(4))
    optimizer = torch.optim.SGD([{"params": [c, a]}, {"params": [d]}, {"params": [b]}], lr=0.1)
    for parameter in (a, b, c):
        parameter.grad = torch.zeros(2)
    found = gradient_ops.parameters_with_gradient(optimizer)
    assert [id(p) for p in found] == [id(c), id(a), id(b)]


# -- norms -------------------------------------------------------------------------------------------------------------


@lists
@dtypes
def test_shard_norms_equal_those_in_double_precision(shapes, dtype):
    shards = a_list(shapes, dtype)
    norms = gradient_ops.shard_norms(shards)
    assert norms.shape == (len(shapes),)
    assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norms.double(), exact_norms(shards), rtol=1e-5, atol=0)


def test_shard_norms_keep_the_order_of_a_mixed_list():
    shards = a_mixed_list()
    norms = gradient_ops.shard_norms(shards)
    assert norms.dtype == torch.float64
    torch.testing.assert_close(norms, exact_norms(shards), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_shard_norms_of_16_bit_gradients_are_taken_in_single_precision(dtype):
    large = torch.full((1000,), 3e4, dtype=dtype)  # its norm does not fit into fp16
    small = torch.full((1000,), 2.0**-14, dtype=dtype)  # its squares do not
    norms = gradient_ops.shard_norms([large, small])
    torch.testing.assert_close(norms.double(), exact_norms([large, small]), rtol=1e-5, atol=0)


@dtypes
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("shape", [(), (1,), (9,), (40, 41)], ids=str)
def test_a_non_finite_element_makes_exactly_its_norm_non_finite(dtype, value, shape):
    shards = [torch.ones(3, dtype=dtype), torch.ones(shape, dtype=dtype), torch.ones(2, dtype=dtype)]
    shards[1].view(-1)[-1] = value
    assert torch.isfinite(gradient_ops.shard_norms(shards)).tolist() == [True, False, True]


@lists
@dtypes
def test_square_sum_counts_every_element_once(shapes, dtype):
    shards = a_list(shapes, dtype)
    norms = gradient_ops.shard_norms(shards)
    exact = exact_norms(shards).square()
    for copies in ([1] * len(shards), [4] * len(shards), list(range(1, len(shards) + 1))):
        total = gradient_ops.square_sum(norms, copies)
        assert (total.shape, total.dtype) == ((), torch.float64)
        expected = sum(square / number for square, number in zip(exact.tolist(), copies, strict=True))
        assert total.item() == pytest.approx(expected, rel=1e-5)


def test_square_sum_holds_sums_that_do_not_fit_into_single_precision():
    """A finite gradient must not be called an overflow because there is much of it."""
    norms = gradient_ops.shard_norms([torch.full((2,), 1e19), torch.full((2,), 1e19)])
    assert gradient_ops.square_sum(norms, [1, 1]).sqrt().item() == pytest.approx(2e19, rel=1e-5)


def test_the_largest_norm_is_the_first_whose_square_overflows_in_single_precision():
    """Norms are summed in float64, and rounded before they are squared."""
    largest = torch.tensor(gradient_ops.LARGEST_NORM, dtype=torch.float64)
    below = largest.nextafter(torch.zeros((), dtype=torch.float64))
    assert [bool(norm.float().square().isinf()) for norm in (largest, below)] == [True, False]
    assert gradient_ops.not_below(torch.stack([largest, below]), gradient_ops.LARGEST_NORM).tolist() == [1.0, 0.0]


def test_sums_are_kept_in_double_precision_but_on_mps():
    assert accumulation_dtype(torch.device("cpu")) == torch.float64
    assert accumulation_dtype(torch.device("cuda", 0)) == torch.float64
    assert accumulation_dtype(torch.device("mps")) == torch.float32


# -- non-finite --------------------------------------------------------------------------------------------------------


def overflows(shards):
    return gradient_ops.any_overflow(gradient_ops.shard_norms(shards))


@pytest.mark.parametrize("index", [0, 1, 2, 4, 5, 6])
def test_a_non_finite_element_is_found_in_every_member_of_a_mixed_list(index):
    shards = a_mixed_list()
    assert overflows(shards).item() == 0.0
    shards[index][(-1,) * shards[index].ndim] = NAN
    assert overflows(shards).item() == 1.0


@pytest.mark.parametrize(
    ("dtype", "fits", "too_large"),
    [
        (torch.float16, 65504.0, None),
        (torch.bfloat16, 1.8e19, 1.9e19),
        (torch.float32, 1.84e19, 1.85e19),
        (torch.float64, 1.3e154, 1.4e154),
    ],
    ids=str,
)
def test_an_element_overflows_where_its_square_does(dtype, fits, too_large):
    """Adam's second moment is the mean of squares: sqrt(3.4e38) = 1.8e19, sqrt(1.8e308) = 1.3e154."""
    for others in ([], [0.0]):  # torch computes the norm of a single number without its square
        for value, is_found in ((fits, False), (too_large, True)):
            if value is not None:
                norms = gradient_ops.shard_norms([torch.tensor([value, *others], dtype=dtype)])
                assert bool(gradient_ops.any_overflow(norms)) == is_found
                assert bool(norms.isfinite()) != is_found


def test_where_there_is_nothing_nothing_is_found():
    assert overflows([torch.empty(0), torch.empty(2, 0, dtype=torch.float16)]).item() == 0.0


# -- in-place arithmetic -----------------------------------------------------------------------------------------------


@lists
@dtypes
@pytest.mark.parametrize("factor_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("factor", [1 / 3, 2.0**-16, 1e-9, 700.0])
def test_multiplying_rounds_once(shapes, dtype, factor_dtype, factor):
    """The factor is not rounded to the gradient's format: 1e-9 is 0 in fp16, 1/3 is off by half a unit there."""
    factor = torch.tensor(factor, dtype=factor_dtype)
    shards = a_list(shapes, dtype, scale=1000.0 if factor < 1 else 1.0)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    expected = [(shard.to(precise) * factor.to(precise)).to(dtype) for shard in shards]
    gradient_ops.multiply_(shards, factor)
    torch.testing.assert_close(shards, expected, rtol=0, atol=0)


def test_multiplying_reaches_every_member_of_a_mixed_list():
    shards = a_mixed_list()
    expected = [shard.double() * 0.25 for shard in shards]
    gradient_ops.multiply_(shards, torch.tensor(0.25, dtype=torch.float64))
    for shard, wanted in zip(shards, expected, strict=True):
        torch.testing.assert_close(shard.double(), wanted, rtol=0, atol=0)


def test_multiplying_nothing_is_allowed():
    nothing: list[torch.Tensor] = []
    gradient_ops.multiply_(nothing, torch.tensor(2.0))
    gradient_ops.clamp_(nothing, torch.tensor(2.0))
    assert nothing == []


def test_multiplying_keeps_what_is_not_finite():
    """Otherwise the step that follows would not be skipped."""
    shards = [torch.tensor([INF, -INF, NAN, 1.0])]
    gradient_ops.multiply_(shards, torch.tensor(0.5))
    torch.testing.assert_close(shards[0], torch.tensor([INF, -INF, NAN, 0.5]), equal_nan=True)


@lists
@dtypes
@pytest.mark.parametrize("bound", [0.5, 1e-3, 1e6])
def test_clamping_limits_every_element_in_place(shapes, dtype, bound):
    shards = a_list(shapes, dtype)
    expected = [shard.double().clamp(-bound, bound).to(dtype) for shard in shards]
    addresses = [shard.data_ptr() for shard in shards]
    gradient_ops.clamp_(shards, torch.tensor(bound, dtype=torch.float64))
    assert [shard.data_ptr() for shard in shards] == addresses
    torch.testing.assert_close(shards, expected, rtol=TOLERANCE[dtype], atol=0)


def test_clamping_reaches_every_member_of_a_mixed_list_and_leaves_nan():
    shards = a_mixed_list()
    shards[0][1], shards[5][0] = NAN, INF
    gradient_ops.clamp_(shards, torch.tensor(0.25))
    assert math.isnan(shards[0][1])
    assert shards[5][0] == 0.25
    assert all(shard.nan_to_num(0).abs().le(0.25).all() for shard in shards)


@lists
@dtypes
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 2.0**-16, 0.37 * 2.0**-16])
@pytest.mark.parametrize("bound", [0.5, 40.0, 1e6])
def test_scaling_and_clamping_at_once_equals_one_after_the_other(shapes, dtype, factor, bound):
    shards = a_list(shapes, dtype, scale=50.0)
    expected = [factor * shard.double().clamp(-bound, bound) for shard in shards]
    rounded_once = [(shard.float().clamp(-bound, bound) * factor).to(dtype) for shard in shards]
    addresses = [shard.data_ptr() for shard in shards]
    gradient_ops.scaled_clamp_(shards, factor, bound)
    assert [shard.data_ptr() for shard in shards] == addresses
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for shard, wanted in zip(shards, expected, strict=True):
        torch.testing.assert_close(shard.double(), wanted, rtol=TOLERANCE[dtype], atol=smallest)
    if dtype.itemsize == 2:  # where the factor would be rounded, too
        assert all(map(torch.equal, shards, rounded_once))


def test_scaling_and_clamping_reaches_every_member_of_a_mixed_list_and_leaves_nan():
    shards = a_mixed_list()
    shards[0][1], shards[5][0], shards[1][0, 0] = NAN, INF, -INF
    expected = [0.5 * shard.double().clamp(-0.25, 0.25) for shard in shards]
    gradient_ops.scaled_clamp_(shards, 0.5, 0.25)
    for shard, wanted in zip(shards, expected, strict=True):
        torch.testing.assert_close(shard.double(), wanted, rtol=1e-2, atol=0, equal_nan=True)
    gradient_ops.scaled_clamp_([], 0.5, 0.25)


def clip(shards, max_norm):
    norm = gradient_ops.square_sum(gradient_ops.shard_norms(shards), [1] * len(shards)).sqrt()
    gradient_ops.multiply_(shards, gradient_ops.clip_coefficient(norm, max_norm))
    return norm


@lists
@dtypes
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e4])
def test_clipping_equals_torchs(shapes, dtype, max_norm):
    """The same gradients in double precision are torch's part, so that its own rounding does not count."""
    shards = a_list(shapes, dtype)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    for parameter, shard in zip(parameters, shards, strict=True):
        parameter.grad = shard.to(torch.float64, copy=True)
    wanted_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = clip(shards, max_norm)
    torch.testing.assert_close(norm.double(), wanted_norm, rtol=1e-5, atol=0)
    for parameter, shard in zip(parameters, shards, strict=True):
        torch.testing.assert_close(shard.double(), parameter.grad, rtol=max(1e-5, TOLERANCE[dtype]), atol=1e-7)


def test_the_clip_coefficient_of_zero_and_of_inf():
    assert gradient_ops.clip_coefficient(torch.tensor(0.0), 1.0).item() == 1.0
    assert gradient_ops.clip_coefficient(torch.tensor(INF), 1.0).item() == 0.0
    assert math.isnan(gradient_ops.clip_coefficient(torch.tensor(NAN), 1.0).item())


@dtypes
def test_one_kernel_for_all_gradients_of_a_type(dtype):
    """As torch's profiler counts the calls of its operators."""

    def calls(function, *arguments):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            function(*arguments)
        return {event.key: event.count for event in profiler.key_averages()}

    shards = [torch.randn(4).to(dtype) for _ in range(30)]
    assert calls(gradient_ops.shard_norms, shards)["aten::_foreach_norm"] == 1
    multiplying = calls(gradient_ops.multiply_, shards, torch.tensor(0.5))
    in_16_bit = dtype in (torch.float16, torch.bfloat16)
    kernel = "aten::_amp_foreach_non_finite_check_and_unscale_" if in_16_bit else "aten::_foreach_mul_"
    assert multiplying[kernel] == 1


# -- on a GPU, with tensors that have a device and no memory -----------------------------------------------------------

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Operations(TorchDispatchMode):
    """Keeps what ran on which tensors, and what was copied from where to where, and whether without a wait."""

    def __init__(self):
        super().__init__()
        self.ran = []
        self.copied = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = args[0] if args and not isinstance(args[0], torch.Tensor) and isinstance(args[0], list) else args[:1]
        self.ran.append((func.overloadpacket, {(t.device.type, t.dtype) for t in given if isinstance(t, torch.Tensor)}))
        if func.overloadpacket is torch.ops.aten._to_copy:
            self.copied.append((args[0].device.type, result.device.type, bool(kwargs.get("non_blocking"))))
        return result


def test_the_host_waits_for_what_a_gpu_sends_and_for_nothing_that_it_sends_itself():
    with FakeTensorMode(), Operations() as operations:
        assert sent_to(torch.ones(2, device=CUDA), CPU, torch.float64).device == CPU
        assert sent_to(torch.ones(2), CUDA).device == CUDA
    assert operations.copied == [("cuda", "cpu", False), ("cpu", "cuda", True)]


def test_nothing_of_a_gpu_is_read_on_the_host_before_it_is_there():
    """Offloaded gradients: the factor is on the GPU."""
    with FakeTensorMode(), Operations() as operations:
        shards = [torch.ones(3, dtype=dtype) for dtype in DTYPES] + [torch.ones(3, device=CUDA)]
        gradient_ops.multiply_(shards, torch.ones((), device=CUDA))
        gradient_ops.clamp_(shards, torch.ones((), device=CUDA))
        assert gradient_ops.shard_norms(shards).device == CPU
    assert ("cuda", "cpu", False) in operations.copied
    assert ("cuda", "cpu", True) not in operations.copied


def test_on_cuda_each_dtype_is_multiplied_once_by_a_kernel_that_takes_it():
    """NotImplementedError: "_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16'."""
    with FakeTensorMode(), Operations() as operations:
        gradient_ops.multiply_([torch.ones(3, device=CUDA, dtype=dtype) for dtype in DTYPES], torch.tensor(2.0))
    aten = torch.ops.aten
    multiplying = {aten._amp_foreach_non_finite_check_and_unscale_, aten.mul_, aten._foreach_mul_}
    assert [(operation, kinds) for operation, kinds in operations.ran if operation in multiplying] == [
        (aten._amp_foreach_non_finite_check_and_unscale_, {("cuda", torch.float16)}),
        (aten.mul_, {("cuda", torch.bfloat16)}),
        (aten._foreach_mul_, {("cuda", torch.float32)}),
        (aten._foreach_mul_, {("cuda", torch.float64)}),
    ]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_bf16_on_cuda_is_multiplied_as_on_the_cpu(shapes):
    """To the bit, by a factor that 16 bits do not hold."""
    factor = torch.tensor(0.3711e-4)
    expected = a_list(shapes, torch.bfloat16)
    shards = [t.clone() for t in expected]
    gradient_ops.multiply_(expected, factor)
    gradient_ops._multiply_wide_(shards, factor)
    assert all(torch.equal(a, b) for a, b in zip(shards, expected, strict=True))
    assert all(t.dtype == torch.bfloat16 for t in shards)


def test_numbers_for_all_ranks_are_on_the_gpu_when_gradients_are_offloaded():
    """NCCL adds nothing up on the host: "No backend type associated with device type cpu"."""
    with FakeTensorMode():
        weight = nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        here = gradient_ops.read_gradients(torch.optim.SGD([weight]))
        assert GradientReplication.every_rank().square_sum(here, CUDA).device == CUDA


def test_a_fused_optimizer_of_weights_on_the_host_is_told_there():
    with FakeTensorMode(), Operations() as operations:
        weight = nn.Parameter(torch.ones(3))
        weight.grad = torch.ones(3)
        optimizer = torch.optim.AdamW([weight], fused=True)
        with fused_step(optimizer, torch.zeros((), device=CUDA), None):
            assert optimizer.found_inf.device == CPU
            optimizer.step()
    assert operations.copied == [("cuda", "cpu", False)]
