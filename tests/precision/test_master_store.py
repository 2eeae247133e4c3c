"""Where masters are kept, and what happens when somebody else changes the weights."""

import pytest
import torch
from torch import nn

from lightning_mp.precision.masters.store import FullMasters, MasterStore, RemainderMasters, refine, rounds_to

STORES = [FullMasters, RemainderMasters]


def parameter_and_value(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Parameter, torch.Tensor]:
    value = torch.randn(64)
    return nn.Parameter(value.to(dtype)), value


@pytest.mark.parametrize("store_class", STORES)
def test_a_master_comes_back_to_the_bit(store_class: type[MasterStore]) -> None:
    store = store_class()
    parameter, value = parameter_and_value()
    store.set(parameter, value)
    assert torch.equal(store.get(parameter), value)
    assert rounds_to(value, parameter.detach()).all()


@pytest.mark.parametrize(("store_class", "bytes_each"), [(FullMasters, 4), (RemainderMasters, 2)])
def test_bytes_of_masters(store_class: type[MasterStore], bytes_each: int) -> None:
    store = store_class()
    for _ in range(3):
        store.set(*parameter_and_value())
    assert store.nbytes == 3 * 64 * bytes_each


@pytest.mark.parametrize("store_class", STORES)
def test_a_step_on_the_lent_master_is_kept(store_class: type[MasterStore]) -> None:
    store = store_class()
    parameter, value = parameter_and_value()
    parameter.lr_scale = 0.5
    store.set(parameter, value.clone())
    (master,) = store.swap_in([parameter])
    assert isinstance(master, nn.Parameter)
    assert master.lr_scale == 0.5
    with torch.no_grad():
        master.add_(1e-6)
    store.write_back([parameter], [master])
    assert torch.equal(store.get(parameter), value + 1e-6)
    assert parameter.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("store_class", "dtype"),
    [(FullMasters, torch.bfloat16), (FullMasters, torch.float16), (RemainderMasters, torch.bfloat16)],
)
def test_weights_changed_in_place_are_followed(store_class: type[MasterStore], dtype: torch.dtype) -> None:
    """Clipped weights, as in a Wasserstein GAN: where nothing was clipped, the bits below stay."""
    store = store_class()
    parameter, value = parameter_and_value(dtype)
    store.set(parameter, value.clone())
    with torch.no_grad():
        parameter.clamp_(-0.5, 0.5)
    master = store.get(parameter)
    inside = value.abs() < 0.49
    assert 0 < inside.sum() < 64
    assert torch.equal(master[inside], value[inside])
    assert (master.abs() <= 0.502).all()
    assert rounds_to(master, parameter.detach()).all()


@pytest.mark.parametrize("how", ["in place", "assigned"])
@pytest.mark.parametrize(
    ("store_class", "dtype"),
    [(FullMasters, torch.bfloat16), (FullMasters, torch.float16), (RemainderMasters, torch.bfloat16)],
)
def test_weights_changed_through_data_are_followed(
    store_class: type[MasterStore], dtype: torch.dtype, how: str
) -> None:
    """torch's version counter does not see them: as many bits stay as after a change that it sees."""
    store, counted = store_class(), store_class()
    parameter, value = parameter_and_value(dtype)
    value[:3] = torch.tensor([-0.0, torch.inf, torch.nan])
    other = nn.Parameter(parameter.detach().clone())
    store.set(parameter, value.clone())
    counted.set(other, value.clone())
    with torch.no_grad():
        other.clamp_(-0.5, 0.5)
    if how == "assigned":
        parameter.data = parameter.data.clamp(-0.5, 0.5)
    else:
        parameter.data.clamp_(-0.5, 0.5)
    assert torch.equal(bits(store.get(parameter)), bits(counted.get(other)))
    assert torch.equal(bits(store.swap_in([parameter])[0]), bits(counted.swap_in([other])[0]))


def bits(value: torch.Tensor) -> torch.Tensor:
    return torch.where(value.isnan(), 0, value.detach()).view(torch.int32)


@pytest.mark.parametrize("store_class", STORES)
def test_a_weight_that_is_stood_in_for_has_its_master_again(store_class: type[MasterStore]) -> None:
    """Averages are put into the model for validation and taken out again; reading masters meanwhile does no harm."""
    store = store_class()
    parameter, value = parameter_and_value()
    store.set(parameter, value.clone())
    trained = parameter.detach().clone()
    for write in (parameter.data.copy_, lambda weight: torch.no_grad()(parameter.copy_)(weight)):
        write(trained * 0.5)
        assert rounds_to(store.get(parameter), parameter.detach()).all()
        write(trained)
        assert torch.equal(store.get(parameter), value)


@pytest.mark.parametrize("store_class", STORES)
def test_a_loaded_state_dict_is_followed(store_class: type[MasterStore]) -> None:
    layer = nn.Linear(4, 4).to(torch.bfloat16)
    store = store_class()
    for parameter in layer.parameters():
        store.set(parameter, parameter.float() * 1.001)
    layer.load_state_dict({"weight": torch.full((4, 4), 3.0), "bias": torch.zeros(4)})
    assert rounds_to(store.get(layer.weight), layer.weight.detach()).all()
    assert rounds_to(store.get(layer.bias), layer.bias.detach()).all()


def test_refine_takes_the_weight_where_the_value_is_another_number() -> None:
    working = torch.tensor([1.0, 1.0, -2.0]).to(torch.bfloat16)
    value = torch.tensor([1.001, 1.5, -2.001])
    assert refine(working, value).tolist() == pytest.approx([1.001, 1.0, -2.001])


def test_both_ways_to_break_a_tie_are_rounding() -> None:
    """A checkpoint of one storage is read by the other."""
    tie = torch.tensor([1.0 + 2.0**-8])
    assert rounds_to(tie, torch.tensor([1.0]).to(torch.bfloat16)).item(), "to even, as torch"
    assert rounds_to(tie, torch.tensor([1.0 + 2.0**-7]).to(torch.bfloat16)).item(), "away from zero, as split"
