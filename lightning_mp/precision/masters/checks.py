"""What MasterWeightsPrecision refuses, at set-up and with what to do instead."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_mp.core import private_api, private_loop_api
from lightning_mp.core.messages import listed
from lightning_mp.core.nested_tensors import named_tensors_in
from lightning_mp.core.precisions import HALF_DTYPES, MASTER_DTYPES
from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.optimizers.schedule_free import has_evaluated_weights
from lightning_mp.precision.autocast_context import why_no_autocast
from lightning_mp.precision.masters.casting import keeps_float32, unit_of_two_dtypes
from lightning_mp.precision.masters.store import Storage, unwrapped

_STORAGES = get_args(Storage)


def check_arguments(precision: str, storage: str, scaler: object) -> None:
    """Refuses arguments that are unknown or contradict each other."""
    if precision not in tuple(MASTER_DTYPES):
        raise ValueError(
            f"MasterWeightsPrecision(precision={precision!r}) is unknown; it must be one of {tuple(MASTER_DTYPES)}."
            " For fp32 weights that are cast at each use, take AutocastPrecision('bf16-mixed') or ('16-mixed')."
        )
    if storage not in _STORAGES:
        raise ValueError(f"MasterWeightsPrecision(storage={storage!r}) is unknown; it must be one of {_STORAGES}.")
    if storage != "fp32" and precision != "bf16-true":
        raise MisconfigurationException(
            f"MasterWeightsPrecision({precision!r}, {storage=}): an fp32 number is not an fp16 number plus more bits,"
            " because fp16 has a different exponent. Use storage='fp32', or 'bf16-true'."
        )
    if scaler is not None and precision == "bf16-true":
        raise MisconfigurationException(
            f"MasterWeightsPrecision('bf16-true') takes no scaler, got {type(scaler).__name__}: bf16 has the range of"
            " fp32. Leave the scaler out, or use '16-true'."
        )


def check_strategy(
    strategy: Strategy, module: nn.Module, *, storage: str, fp32_gradients: bool, compiled_step: bool = False
) -> None:
    """Refuses strategies that cannot do what was requested."""
    name = type(strategy).__name__
    if isinstance(strategy, FSDPStrategy):
        if compiled_step:
            raise MisconfigurationException(
                f"MasterWeightsPrecision(compiled_step=True) cannot be used with {name}, where the optimizer steps fp32"
                " shards itself. Leave compiled_step out."
            )
        if storage != "fp32":
            raise MisconfigurationException(
                f"MasterWeightsPrecision({storage=}) cannot be used with {name}: its shards are fp32 already"
                " and serve as masters. Leave storage out."
            )
        return
    if fp32_gradients and not isinstance(strategy, SingleDeviceStrategy):
        raise MisconfigurationException(
            f"MasterWeightsPrecision(fp32_gradients=True) works on a single device only, got {name}: gradients are"
            " reduced over ranks in the dtype of the weights. Leave it out, or use strategy='fsdp', which reduces and"
            " accumulates in fp32."
        )
    kept = {p for m in module.modules() if keeps_float32(m) for p in m.parameters(recurse=False)}
    if any(isinstance(p, DTensor) for p in kept):
        raise MisconfigurationException(
            "MasterWeightsPrecision keeps norms with running statistics (BatchNorm) in fp32, and here their weights are"
            f" sharded, under {name}. Leave them out of fully_shard (ignored_params), or use GroupNorm or LayerNorm."
        )


def check_fit(trainer: "pl.Trainer", module: nn.Module) -> None:
    """Refuses parameters without a shape, as a master needs one, and callbacks that put fp32 values in their place."""
    if any(
        isinstance(c, ModelPruning) and private_loop_api.rewinds_weights(c) for c in private_api.callbacks_of(trainer)
    ):
        raise MisconfigurationException(
            "ModelPruning restores the weights from before the fit (use_lottery_ticket_hypothesis=True, its"
            " default): to fp32 tensors, where MasterWeightsPrecision has 16-bit weights. Give it"
            " use_lottery_ticket_hypothesis=False, or use AutocastPrecision."
        )
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise MisconfigurationException(
            f"MasterWeightsPrecision needs the shapes of all weights before the first batch, but {listed(lazy)} are"
            " lazy. Run one batch through the model before trainer.fit or in its setup hook, use nn.Linear for"
            " nn.LazyLinear, or use AutocastPrecision."
        )


def check_autocast(precision: str, device_type: str) -> None:
    """Refuses a policy on devices without autocast to the precision's dtype."""
    refusal = why_no_autocast(device_type, MASTER_DTYPES[precision])
    if refusal is not None:
        raise MisconfigurationException(
            f"MasterWeightsPrecision({precision!r}, policy=...) cannot run on {device_type!r}: {refusal}"
        )


def check_parametrizations(module: nn.Module, precision: str, in_float32: Collection[nn.Module]) -> None:
    """Refuses ``parametrizations.orthogonal`` of weights in 16 bit: it raises, or has NaN gradients (torch 2.13)."""
    names = [
        name
        for name, part in module.named_modules()
        if part not in in_float32 and any(map(private_api.is_orthogonal_parametrization, part.children()))
    ]
    if names:
        raise MisconfigurationException(
            f"MasterWeightsPrecision({precision!r}) would compute {listed(names)} in {MASTER_DTYPES[precision]}: torch"
            " has neither the matrix decompositions that orthogonal weights need in 16 bit, nor finite gradients of"
            " their exponential map. Use"
            f" MasterWeightsPrecision({precision!r}, policy={{'*.parametrizations.*': 'fp32'}})."
        )


def warn_about_16_bit_modules(module: nn.Module) -> None:
    """``load_from_checkpoint`` would round fp32 weights into a module whose constructor makes 16-bit ones."""
    names = [name for name, p in module.named_parameters() if p.requires_grad and p.dtype in HALF_DTYPES]
    if names:
        rank_zero_warn(
            f"MasterWeightsPrecision(fp32_checkpoints=True): {type(module).__name__} was created with 16-bit weights"
            f" ({listed(names)}), into which load_from_checkpoint rounds the fp32 weights of a checkpoint. Create the"
            " model in fp32 (from_pretrained(..., dtype=torch.float32)); the plugin casts it."
        )


def refuse_copies_of_weights(optimizer: Optimizer) -> None:
    """Refuses optimizers that have views or moments of 16-bit weights elsewhere than in their groups and state.

    Only what is there can be swapped for fp32: distributed-shampoo makes blocks of the weights in its constructor.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.dtype in HALF_DTYPES]
    own = {id(weight) for weight in weights}
    memory = {unwrapped(local_shard(weight.detach())).untyped_storage().data_ptr() for weight in weights} - {0}
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    for tensor in _tensors_in(attributes, depth=5):
        is_view = type(tensor) is Tensor and id(tensor) not in own and tensor.dtype in HALF_DTYPES
        if is_view and tensor.untyped_storage().data_ptr() in memory:
            raise MisconfigurationException(
                f"MasterWeightsPrecision cannot be used with {type(optimizer).__name__}, whose constructor made views"
                " of the 16-bit weights that it steps in place of its param_groups. Use AutocastPrecision, which keeps"
                " fp32 weights."
            )


def refuse_states_by_memory(optimizer: Optimizer, storage: str) -> None:
    """Refuses heavyball's optimizers with ``train()`` and ``eval()`` where masters are lent in new memory (3.2)."""
    if storage != "fp32" and type(optimizer).__module__.startswith("heavyball") and has_evaluated_weights(optimizer):
        raise MisconfigurationException(
            f"MasterWeightsPrecision({storage=}) cannot be used with {type(optimizer).__name__} of heavyball,"
            " which finds its state by the memory of a weight, and that is new in every step. Use storage='fp32'."
        )


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    """Tensors in containers, and in attributes of objects that an optimizer has made of its package's classes."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, (str, bytes, type, nn.Module, Optimizer)) and not callable(value):
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for entry in inner or getattr(value, "__dict__", {}).values():
            yield from _tensors_in(entry, depth - 1)


def check_sharding_units(module: nn.Module, in_float32: Collection[nn.Module]) -> None:
    """Refuses FSDP2 units that would hold weights in 16 bit and weights that the policy keeps in fp32."""
    found = unit_of_two_dtypes(module, in_float32)
    if found is None:
        return
    unit, wide, narrow = found
    kept, others = (listed(names) for names in (wide, narrow))
    raise MisconfigurationException(
        f"MasterWeightsPrecision: fully_shard puts {kept}, which the policy keeps in fp32, into one unit"
        f" ({unit or 'the model'}) with 16-bit {others}. In configure_model shard the units that"
        " lightning_mp.policy.sharding_units.sharding_units returns, or use AutocastPrecision."
    )


def dtype_hint(precision: str, error: str, *, with_policy: bool) -> str:
    """What to do about an error of torch about two dtypes, or a dtype that an operation does not have."""
    dtype = MASTER_DTYPES[precision]
    if "not implemented for" in error or "not supported" in error:
        return (
            f"HINT: under MasterWeightsPrecision({precision!r}) weights and inputs are {dtype}, for which torch"
            " does not have this operation. Give the module that computes it a rule in fp32:"
            " policy={'name.of.module': 'fp32'}; in a step itself, create its inputs with dtype=torch.float32."
        )
    if not with_policy:
        return (
            f"HINT: under MasterWeightsPrecision({precision!r}) weights and inputs are {dtype},"
            " buffers are fp32, and what is computed with a buffer becomes fp32. Cast it where it is used:"
            " `x + self.table.to(x.dtype)`; or use AutocastPrecision."
        )
    return (
        f"HINT: under MasterWeightsPrecision({precision!r}, policy=...) weights are {dtype}, and an operation outside"
        " of autocast's lists mixed them with fp32 values. Give its module a rule in fp32, or cast where it is called;"
        " or use AutocastPrecision."
    )


def warn_about_lost_inputs(batch: Any, precision: str) -> None:
    """Warns where the cast of a batch to 16 bit does more than round measurements.

    That is so for columns of whole numbers (ids, time stamps: bf16 has all up to 256, fp16 up to 2,048) of which some
    become others, and for finite numbers that become infinite.
    """
    dtype = MASTER_DTYPES[precision]
    for name, tensor in named_tensors_in(batch):
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta
        if not plain or not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        cast = tensor.to(dtype).to(tensor.dtype)
        columns = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
        whole = (columns == columns.trunc()).all(0).expand(columns.shape).reshape(tensor.shape)
        lost = tensor.isfinite() & torch.where(whole, cast != tensor, cast.isinf())
        if lost.any():
            before, after = float(tensor[lost][0]), float(cast[lost][0])
            rank_zero_warn(
                f"MasterWeightsPrecision({precision!r}) casts floating-point tensors of a batch to {dtype}, and in"
                f" {name} {before:.15g} becomes {after:.15g}. Give ids and other whole numbers as integers, which are"
                " not cast; or scale the data; or use policy=PrecisionPolicy.default(), under which batches stay fp32."
            )
