"""LossScaler beside torch's GradScaler: alike where torch is right, and what it does where torch is not."""

import copy
import inspect
import io
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_mp
from lightning_mp.training.optimizer_step.loss_scaler import FLOOR_PATIENCE_STEPS, LossScaleFloorError, LossScaler
from lightning_mp.training.optimizer_step.update_rule import ScaleRule

OPEN = {"min_scale": 0.0, "max_scale": math.inf}
INF, NAN = float("inf"), float("nan")

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
}


def a_gradient(scaler, optimizer, true_gradient=1.0):
    """Sets the gradients that a loss with these derivatives would give, by way of the scaler and backward."""
    optimizer.zero_grad()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    factor = torch.tensor(true_gradient)
    scaler.scale(torch.stack([(p * factor).sum() for p in parameters]).sum()).backward()


def one_step(scaler, optimizer, true_gradient=1.0, *, unscale_first=False):
    a_gradient(scaler, optimizer, true_gradient)
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def new_parameter():
    return nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))


# -- the same as torch -------------------------------------------------------------------------------------------------


def assert_same_run(torchs, ours, overflows, make_optimizer, *, unscale_first=False):
    """Steps both scalers with their own parameter and compares scale, tracker and weights after every step."""
    parameters = [new_parameter(), new_parameter()]
    optimizers = [make_optimizer([p]) for p in parameters]
    for step, overflow in enumerate(overflows):
        true_gradient = (INF, NAN, -INF)[step % 3] if overflow else 1.0 / (step + 3)
        for scaler, optimizer in zip((torchs, ours), optimizers, strict=True):
            one_step(scaler, optimizer, true_gradient, unscale_first=unscale_first)
        if torchs.get_scale() <= 2.0**-126:
            break  # from here on torch's inverse scale is inf, which is another test's subject
        assert ours.get_scale() == torchs.get_scale()
        assert ours.state_dict()["_growth_tracker"] == torchs.state_dict()["_growth_tracker"]
        assert torch.equal(*parameters)
    return parameters[0]


@given(
    st.lists(st.booleans(), min_size=1, max_size=25),
    st.floats(2.0**-10, 2.0**40),
    st.floats(1.01, 16.0),
    st.floats(0.01, 0.99),
    st.integers(1, 5),
    st.sampled_from(list(OPTIMIZERS)),
    st.booleans(),
)
def test_scale_and_weights_follow_grad_scaler_bit_for_bit(
    overflows, init_scale, growth_factor, backoff_factor, growth_interval, optimizer, unscale_first
):
    """D05: also with a fused optimizer whose gradients are unscaled before its step."""
    arguments = ("cpu", init_scale, growth_factor, backoff_factor, growth_interval)
    torchs, ours = GradScaler(*arguments), LossScaler(*arguments, **OPEN)
    assert_same_run(torchs, ours, overflows, OPTIMIZERS[optimizer], unscale_first=unscale_first)


def test_the_first_five_arguments_and_their_defaults_are_torchs():
    torchs, ours = GradScaler("cpu"), LossScaler("cpu")
    assert torchs.state_dict().items() <= ours.state_dict().items()
    names = list(inspect.signature(GradScaler).parameters)
    assert list(inspect.signature(LossScaler).parameters)[: len(names)] == names
    assert isinstance(ours, GradScaler)


MISUSES = {
    "update before the first loss": lambda scaler, _: scaler.update(),
    "step before the first loss": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale before the first loss": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "unscale twice": lambda scaler, optimizer: [
        a_gradient(scaler, optimizer),
        scaler.unscale_(optimizer),
        scaler.unscale_(optimizer),
    ],
    "unscale after the step": lambda scaler, optimizer: [
        a_gradient(scaler, optimizer),
        scaler.step(optimizer),
        scaler.unscale_(optimizer),
    ],
    "step twice": lambda scaler, optimizer: [
        a_gradient(scaler, optimizer),
        scaler.step(optimizer),
        scaler.step(optimizer),
    ],
    "update without a step": lambda scaler, optimizer: [a_gradient(scaler, optimizer), scaler.update()],
    "a closure": lambda scaler, optimizer: [a_gradient(scaler, optimizer), scaler.step(optimizer, closure=lambda: 1)],
    "a loss that is no tensor": lambda scaler, _: scaler.scale(3.0),
    "an empty state": lambda scaler, _: scaler.load_state_dict({}),
    "pickling in the middle of a step": lambda scaler, optimizer: [
        a_gradient(scaler, optimizer),
        scaler.unscale_(optimizer),
        pickle.dumps(scaler),
    ],
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_wrong_use_is_refused_in_torchs_words(misuse):
    errors = []
    for scaler in (GradScaler("cpu"), LossScaler("cpu")):
        with pytest.raises((AssertionError, RuntimeError, ValueError)) as caught:
            MISUSES[misuse](scaler, torch.optim.SGD([new_parameter()], lr=0.1))
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_disabled_it_is_torchs_no_op():
    results = []
    for scaler in (GradScaler("cpu", enabled=False), LossScaler("cpu", enabled=False)):
        parameter = new_parameter()
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        loss = (parameter * 1.0).sum().half()
        assert scaler.scale(loss) is loss
        losses = [loss]
        assert scaler.scale(losses) is losses
        loss.backward()
        scaler.unscale_(optimizer)
        returned = scaler.step(optimizer, closure=lambda: 7.0)
        scaler.update()
        scaler.update(2.0)
        scaler.load_state_dict({"scale": 2.0})
        copied = pickle.loads(pickle.dumps(scaler))
        results.append(
            (
                scaler.get_scale(),
                scaler.state_dict(),
                scaler.is_enabled(),
                copied.is_enabled(),
                returned,
                *parameter.tolist(),
            )
        )
    assert results[0] == results[1] == (1.0, {}, False, False, 7.0, 0.5, -2.5, 2.5)


def test_setters_of_torch_are_obeyed():
    scaler = LossScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD([new_parameter()], lr=0.1)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    one_step(scaler, optimizer)
    assert scaler.get_scale() == 256.0
    one_step(scaler, optimizer, INF)
    assert scaler.get_scale() == 64.0


def test_a_healthy_fused_step_waits_for_nothing_more_than_the_optimizer_does():
    """Each read of a scalar on the host would stop a GPU."""

    class CountReads(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.reads += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    scaler = LossScaler("cpu")
    optimizer = torch.optim.AdamW([new_parameter()], lr=0.1, fused=True)
    one_step(scaler, optimizer)
    with CountReads() as counter:
        for true_gradient in (1.0, INF, 1.0):
            one_step(scaler, optimizer, true_gradient)
        assert counter.reads == 0
        scaler.get_scale()
        assert counter.reads == 1


# -- bounds, floor and ceiling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_166_overflows_in_a_row_do_not_reach_the_weights(optimizer):
    """D01: torch's scale is 0 by then; its next healthy step multiplies by 1/0 and writes NaN into the weights."""
    results = {}
    for scaler in (GradScaler("cpu"), LossScaler("cpu", on_floor="ignore")):
        parameter = new_parameter()
        stepping = OPTIMIZERS[optimizer]([parameter])
        one_step(scaler, stepping)
        for _ in range(166):
            one_step(scaler, stepping, INF)
        one_step(scaler, stepping)
        results[type(scaler)] = (scaler.get_scale(), parameter.detach())

    torchs_scale, torchs_weights = results[GradScaler]
    assert torchs_scale == 0.0
    assert not torch.isfinite(torchs_weights).any()

    our_scale, our_weights = results[LossScaler]
    assert our_scale == 2.0**-24
    plain = new_parameter()
    stepping = OPTIMIZERS[optimizer]([plain])
    for _ in range(2):
        one_step(GradScaler("cpu", enabled=False), stepping)
    assert torch.allclose(our_weights, plain, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 2.0**-140, 2.0**-149])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_scale_whose_inverse_is_not_finite_steps_nothing(scale, optimizer):
    """With an open floor the scale can still get there."""
    scaler = LossScaler("cpu", min_scale=0.0, on_floor="ignore")
    parameter = new_parameter()
    stepping = OPTIMIZERS[optimizer]([parameter])
    a_gradient(scaler, stepping)
    scaler.update(scale)
    one_step(scaler, stepping)
    assert torch.equal(parameter, new_parameter())


def test_the_scale_grows_up_to_the_ceiling_and_no_further():
    """D06."""
    torchs, ours = GradScaler("cpu", growth_interval=1), LossScaler("cpu", growth_interval=1)
    scales = {torchs: [], ours: []}
    for scaler, seen in scales.items():
        optimizer = torch.optim.SGD([new_parameter()], lr=0.0)
        for _ in range(12):
            one_step(scaler, optimizer, 2.0**-30)
            seen.append(scaler.get_scale())
    assert scales[torchs] == [2.0**power for power in range(17, 29)]
    assert scales[ours] == [2.0**power for power in range(17, 25)] + [2.0**24] * 4


def test_a_scale_that_is_set_is_held_within_the_bounds():
    scaler = LossScaler("cpu", min_scale=2.0, max_scale=2.0**20)
    scaler.scale(torch.ones(()))
    for wanted, held in [(1.0, 2.0), (2.0**30, 2.0**20), (64.0, 64.0), (torch.tensor(INF), 2.0**20)]:
        scaler.update(wanted)
        assert scaler.get_scale() == held


def test_a_static_scale_never_changes_and_overflows_are_still_skipped():
    scaler = LossScaler.static(2.0**15, "cpu")
    parameter = new_parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler.set_growth_interval(2)
    for true_gradient in [1.0, INF, NAN, 1.0, 0.0, 0.0, 0.0]:
        one_step(scaler, optimizer, true_gradient)
        assert scaler.get_scale() == 2.0**15
    assert torch.equal(parameter, new_parameter() - 1.0)
    assert LossScaler.static(4.0, enabled=False).get_scale() == 1.0
    assert isinstance(type("Own", (LossScaler,), {}).static(4.0, "cpu"), LossScaler)


def overflow_at_the_floor(scaler, number, optimizer=None):
    optimizer = optimizer or torch.optim.SGD([new_parameter()], lr=0.1)
    for _ in range(number):
        one_step(scaler, optimizer, INF)


FLOOR_MESSAGE = (
    r"^LossScaler: the last 20 steps overflowed with the loss scale at its floor, 0\.5: no scale makes these gradients"
    r" finite\. OverflowPostMortem\(replay=True\) names the layer; or train in bf16\. To continue regardless, use"
    r" LossScaler\(on_floor='warn'\)\.$"
)


def test_overflows_that_go_on_at_the_floor_end_the_run():
    assert FLOOR_PATIENCE_STEPS == 20
    scaler = LossScaler("cpu", init_scale=2.0, min_scale=0.5)
    parameter = new_parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    # two lower the scale to its floor, twenty are counted there, and the count is read one step late
    overflow_at_the_floor(scaler, 22, optimizer)
    with pytest.raises(LossScaleFloorError, match=FLOOR_MESSAGE):
        one_step(scaler, optimizer, INF)
    assert scaler.get_scale() == 0.5
    assert torch.equal(parameter, new_parameter())
    assert hasattr(lightning_mp, "OverflowPostMortem")


def test_a_floor_that_is_left_in_time_ends_nothing():
    scaler = LossScaler("cpu", init_scale=0.5, min_scale=0.5)
    optimizer = torch.optim.SGD([new_parameter()], lr=0.1)
    for _ in range(3):
        overflow_at_the_floor(scaler, 19, optimizer)
        assert scaler.state_dict()["_floor_tracker"] == 19
        one_step(scaler, optimizer)
        assert scaler.state_dict()["_floor_tracker"] == 0


def test_on_floor_warn_goes_on_and_says_so_every_twenty_steps():
    """The remedy that the error offers."""
    scaler = LossScaler("cpu", init_scale=0.5, min_scale=0.5, on_floor="warn")
    with pytest.warns(RuntimeWarning, match=FLOOR_MESSAGE.replace("20", r"(20|40)")) as caught:
        overflow_at_the_floor(scaler, 45)
    assert len(caught) == 2


# -- 16-bit losses, 16-bit and sparse gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_16_bit_loss_is_scaled_in_single_precision(dtype, shape):
    """D06: 2.0 times 2^16 does not fit into fp16; ShardedGradScaler makes inf of it, torch of all but scalars."""
    loss = torch.full(shape, 2.0, dtype=dtype)
    if dtype == torch.float16:
        assert ShardedGradScaler("cpu").scale(loss).isinf().all()
        assert GradScaler("cpu").scale(loss).isinf().all() == (shape != ())
    scaled = LossScaler("cpu").scale(loss)
    torch.testing.assert_close(scaled, torch.full(shape, 131072.0), rtol=0, atol=0)


def test_many_losses_are_scaled_in_their_containers():
    half, single, double = (torch.tensor([2.0], dtype=d) for d in (torch.float16, torch.float32, torch.float64))
    scaler = LossScaler("cpu")
    scaled = scaler.scale([half, (single, double)])
    assert scaled == [131072.0, (131072.0, 131072.0)]
    assert isinstance(scaled[1], tuple)
    assert [t.dtype for t in (scaled[0], *scaled[1])] == [torch.float32, torch.float32, torch.float64]
    assert list(LossScaler("cpu").scale(t for t in (half, single))) == [131072.0, 131072.0]


def test_the_gradient_of_a_scaled_16_bit_loss_keeps_its_type():
    weight = nn.Parameter(torch.tensor([3.0], dtype=torch.float16))
    LossScaler("cpu", init_scale=8.0).scale((weight * 2).sum()).backward()
    assert weight.grad.item() == 16.0
    assert weight.grad.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_gradients_of_any_type_are_stepped_with_or_skipped(dtype, unscale_first):
    """D28: torch refuses fp16 gradients."""
    parameters = [nn.Parameter(torch.tensor([1.0, -2.0], dtype=d)) for d in (dtype, torch.float32)]
    optimizer = torch.optim.SGD(parameters, lr=0.25)
    if dtype == torch.float16:
        a_gradient(GradScaler("cpu", init_scale=16.0), optimizer)
        refusing = GradScaler("cpu")
        refusing.scale(torch.ones(()))
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            refusing.step(optimizer)
    scaler = LossScaler("cpu", init_scale=16.0)
    one_step(scaler, optimizer, 2.0, unscale_first=unscale_first)
    assert [p.tolist() for p in parameters] == [[0.5, -2.5]] * 2
    a_gradient(scaler, optimizer)
    parameters[0].grad[1] = INF
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert [p.tolist() for p in parameters] == [[0.5, -2.5]] * 2
    assert scaler.get_scale() == 8.0


def test_fp16_parameters_are_stepped_by_a_fused_optimizer():
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=0.25, fused=True)
    scaler = LossScaler("cpu", init_scale=16.0)
    one_step(scaler, optimizer, 2.0)
    assert parameter.tolist() == [0.5, -2.5]
    one_step(scaler, optimizer, NAN)
    assert parameter.tolist() == [0.5, -2.5]


def test_a_sparse_fp16_gradient_that_overflows_only_when_its_rows_are_added_is_found():
    weight = nn.Parameter(torch.ones(3, 1, dtype=torch.float16))
    weight.grad = torch.sparse_coo_tensor(
        [[1, 1]], torch.full((2, 1), 60000.0, dtype=torch.float16), (3, 1), is_coalesced=False, check_invariants=True
    )
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = LossScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert torch.equal(weight, torch.ones(3, 1, dtype=torch.float16))


# -- state -------------------------------------------------------------------------------------------------------------


@st.composite
def scaler_arguments(draw):
    """Arguments that are all apart from the defaults, and valid together. Scales are kept in single precision."""
    min_scale = draw(st.floats(2.0**-20, 128.0, width=32))
    max_scale = draw(st.floats(min_scale, 2.0**30, width=32))
    return {
        "init_scale": draw(st.floats(min_scale, max_scale, width=32)),
        "growth_factor": draw(st.floats(1.01, 8.0)),
        "backoff_factor": draw(st.floats(0.01, 0.99)),
        "growth_interval": draw(st.integers(1, 5)),
        "min_scale": min_scale,
        "max_scale": max_scale,
        "hysteresis": draw(st.integers(2, 4)),
        "hysteresis_refill": draw(st.sampled_from(["step", "growth"])),
        "on_floor": draw(st.sampled_from(["ignore", "warn"])),
    }


def take_steps(scaler, overflows):
    optimizer = torch.optim.SGD([new_parameter()], lr=0.0)
    scales = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LossScaler: the last .* overflowed")
        for overflow in overflows:
            one_step(scaler, optimizer, INF if overflow else 1.0)
            scales.append(scaler.get_scale())
    return scales, scaler.state_dict()


overflow_sequences = st.lists(st.booleans(), max_size=12)


def through_state_dict(scaler, *, used):
    """Into a scaler with other arguments, before or after it has made its tensors."""
    other = LossScaler("cpu", 3.0, 5.0, 0.9, 7, min_scale=2.0, max_scale=9.0, hysteresis=9)
    if used:
        take_steps(other, [False, True, False])
    other.load_state_dict(scaler.state_dict())
    return other


def through_a_checkpoint(scaler):
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    other = LossScaler("cpu")
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


COPIES = {
    "state dict into a new scaler": lambda scaler: through_state_dict(scaler, used=False),
    "state dict into a used scaler": lambda scaler: through_state_dict(scaler, used=True),
    "checkpoint file": through_a_checkpoint,
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.full
@pytest.mark.parametrize("way", COPIES)
@settings(max_examples=25)
@given(arguments=scaler_arguments(), before=overflow_sequences, after=overflow_sequences)
def test_every_field_survives_and_the_copy_goes_on_alike(way, arguments, before, after):
    scaler = LossScaler("cpu", **arguments)
    take_steps(scaler, before)
    copied = COPIES[way](scaler)
    assert copied.state_dict() == scaler.state_dict()
    assert copied.rule == scaler.rule
    assert take_steps(copied, after) == take_steps(scaler, after)


def test_the_state_names_every_argument():
    arguments = set(inspect.signature(LossScaler).parameters) - {"device", "init_scale", "enabled", "process_group"}
    trackers = {"scale", "_growth_tracker", "_hysteresis_tracker", "_floor_tracker"}
    assert set(LossScaler("cpu").state_dict()) == arguments | trackers


@pytest.mark.parametrize("before", [0, 15])
def test_the_count_of_overflows_at_the_floor_survives(before):
    scaler = LossScaler("cpu", init_scale=0.5, min_scale=0.5)
    overflow_at_the_floor(scaler, before)
    resumed = LossScaler("cpu")
    resumed.load_state_dict(scaler.state_dict())
    overflow_at_the_floor(resumed, 20 - before)
    with pytest.raises(LossScaleFloorError):
        overflow_at_the_floor(resumed, 1)


@settings(max_examples=50)
@given(overflow_sequences, overflow_sequences, st.booleans())
def test_a_checkpoint_of_grad_scaler_is_continued_and_the_other_way_round(before, after, used):
    torchs = GradScaler("cpu", init_scale=2.0**10, growth_factor=3.0, backoff_factor=0.25, growth_interval=3)
    take_steps(torchs, before)
    ours = LossScaler("cpu", min_scale=2.0**-100, hysteresis_refill="growth")
    if used:
        take_steps(ours, [False, True])
    ours.load_state_dict(torchs.state_dict())
    assert torchs.state_dict().items() <= ours.state_dict().items()
    assert (ours.rule.min_scale, ours.rule.hysteresis_refill) == (2.0**-100, "growth")

    back = GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == torchs.state_dict()
    assert take_steps(back, after)[0] == take_steps(torchs, after)[0] == take_steps(ours, after)[0]


def test_a_loaded_scale_outside_the_bounds_is_brought_inside_with_a_warning():
    torchs = GradScaler("cpu", init_scale=2.0**30)
    ours = LossScaler("cpu")
    message = (
        r"^LossScaler: the checkpoint's loss scale 1073741824 is outside \[5\.960464478e-08, 16777216\], so the run"
        r" continues with 16777216\. To keep it, widen min_scale or max_scale\.$"
    )
    with pytest.warns(UserWarning, match=message):
        ours.load_state_dict(torchs.state_dict())
    assert ours.get_scale() == 2.0**24
    widened = LossScaler("cpu", max_scale=2.0**30)  # the remedy; a warning would be an error here
    widened.load_state_dict(torchs.state_dict())
    assert widened.get_scale() == 2.0**30


@pytest.mark.parametrize("scale", [0.1, 0.7, 1e6 / 3])
def test_a_scale_that_single_precision_rounds_beyond_its_bound_is_loaded_without_a_warning(scale):
    scaler = LossScaler.static(scale, "cpu")
    one_step(scaler, torch.optim.SGD([new_parameter()], lr=0.1))
    resumed = LossScaler.static(scale, "cpu")
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.get_scale() == scaler.get_scale()


SAVED_WRONG = [
    ({"min_scale": NAN}, "min_scale=nan, which is not valid: min_scale must be from 0 to max_scale="),
    (
        {"max_scale": NAN},
        "min_scale=5.960464477539063e-08, which is not valid: min_scale must be from 0 to max_scale=nan",
    ),
    ({"max_scale": 0.0}, "min_scale=5.960464477539063e-08, which is not valid"),
    ({"growth_factor": 0.5}, "growth_factor=0.5, which is not valid: growth_factor must be greater than 1"),
    ({"growth_factor": "2"}, "growth_factor='2', which is not valid"),
    ({"growth_factor": None}, "growth_factor=None, which is not valid"),
    ({"backoff_factor": 2.0}, "backoff_factor=2.0, which is not valid: backoff_factor must be between 0 and 1"),
    ({"growth_interval": 0}, "growth_interval=0, which is not valid: growth_interval must be a number of steps"),
    ({"growth_interval": 2.5}, "growth_interval=2.5, which is not valid"),
    ({"hysteresis": 0}, "hysteresis=0, which is not valid"),
    ({"hysteresis_refill": "x"}, "hysteresis_refill='x', which is not valid"),
    ({"on_floor": "x"}, "on_floor='x', which is not valid: on_floor must be 'raise', 'warn' or 'ignore'."),
    (
        {"_growth_tracker": -1},
        "_growth_tracker=-1, which is not valid: _growth_tracker must be a whole number of steps",
    ),
    ({"_growth_tracker": 1.5}, "_growth_tracker=1.5, which is not valid"),
    ({"_floor_tracker": -3}, "_floor_tracker=-3, which is not valid"),
    ({"_hysteresis_tracker": "1"}, "_hysteresis_tracker='1', which is not valid"),
    ({"scale": -1.0}, "scale=-1.0, which is not valid: scale must be a positive number"),
    ({"scale": torch.ones(2)}, "scale=tensor([1., 1.]), which is not valid"),
]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(("entries", "text"), SAVED_WRONG, ids=lambda value: str(value)[:40])
def test_a_state_that_nobody_wrote_is_refused_before_anything_is_changed(entries, text, used):
    scaler = LossScaler("cpu", init_scale=8.0, hysteresis=2)
    if used:
        take_steps(scaler, [False, True])
    before = scaler.state_dict()
    # All of it differs, so that whatever was taken would show.
    other = LossScaler("cpu", init_scale=4.0, growth_interval=5, hysteresis=3, on_floor="warn").state_dict()
    with pytest.raises(ValueError, match="^The checkpoint's loss scaler has ") as caught:
        scaler.load_state_dict(other | entries)
    assert str(caught.value).startswith(f"The checkpoint's loss scaler has {text}")
    assert str(caught.value).endswith(" Load another checkpoint, or take the scaler's state out of this one.")
    assert scaler.state_dict() == before


@pytest.mark.parametrize("key", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
def test_a_state_without_one_of_torchs_entries_is_refused_before_anything_is_changed(key):
    scaler = LossScaler("cpu")
    before = scaler.state_dict()
    other = LossScaler("cpu", init_scale=4.0, growth_interval=5, hysteresis=3).state_dict()
    del other[key]
    with pytest.raises(ValueError, match=f"^The checkpoint's loss scaler lacks {key}; it has .*hysteresis, "):
        scaler.load_state_dict(other)
    assert scaler.state_dict() == before


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"growth_factor": 1.01},
        {"backoff_factor": 0.01},
        {"backoff_factor": 0.99},
        {"growth_interval": 1},
        {"min_scale": 0.0},
        {"min_scale": 2.0**16, "max_scale": 2.0**16},
        {"init_scale": 2.0**24},
        {"init_scale": 2.0**-24},
        {"init_scale": 2.0**-126, "min_scale": 0.0},
        {"init_scale": 2.0**126, "max_scale": INF},
        {"max_scale": INF},
        {"hysteresis": 1},
        {"hysteresis_refill": "step"},
        {"hysteresis_refill": "growth"},
        {"on_floor": "raise"},
        {"on_floor": "warn"},
        {"on_floor": "ignore"},
    ],
    ids=str,
)
def test_whatever_a_refusal_allows_works(arguments):
    scaler = LossScaler("cpu", **arguments)
    assert set(arguments.items()) - {("init_scale", scaler.get_scale())} <= set(scaler.state_dict().items())
    take_steps(scaler, [False, True, False])


def test_a_scale_that_is_no_number_is_refused_where_it_is_set_and_where_it_is_loaded():
    scaler = LossScaler("cpu", max_scale=INF)
    scaler.scale(torch.ones(()))
    for nan in (NAN, torch.tensor(NAN)):
        with pytest.raises(ValueError, match=r"^LossScaler\.update\(new_scale=nan\): a loss scale must be"):
            scaler.update(nan)
    with pytest.raises(ValueError, match="^The checkpoint's loss scale is nan: .* Load an earlier checkpoint"):
        scaler.load_state_dict(scaler.state_dict() | {"scale": NAN})
    assert scaler.get_scale() == 2.0**16
    scaler.update(INF)
    assert scaler.get_scale() == 2.0**126
    with pytest.warns(UserWarning, match="loss scale inf is outside"):
        scaler.load_state_dict(scaler.state_dict() | {"scale": INF})
    assert scaler.get_scale() == 2.0**126


def test_disabled_its_rule_says_what_it_was_made_with():
    arguments = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "min_scale": 2.0, "hysteresis": 4}
    assert LossScaler("cpu", **arguments, enabled=False).rule == LossScaler("cpu", **arguments).rule
    assert LossScaler(enabled=False).rule == ScaleRule()


def test_cuda_that_is_not_there_is_refused_and_both_remedies_work(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = (
        r"^LossScaler\(device='cuda'\): CUDA is not available on this machine\. Leave `device` out to use the device"
        r" that is available, or pass enabled=False\.$"
    )
    with pytest.raises(ValueError, match=message):
        LossScaler("cuda")
    assert not LossScaler("cuda", enabled=False).is_enabled()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    scaler = LossScaler()
    one_step(scaler, torch.optim.SGD([new_parameter()], lr=0.1))
    assert scaler.is_enabled()
