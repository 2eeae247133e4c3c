"""Gradients that several ranks hold together: one decision, one norm, the same weights as a single process.

Every layout runs in real gloo processes on real DTensors. All numbers are small fractions of powers of two, so
that sums over ranks and products are exact and compared without tolerance where the arithmetic is exact.
"""

import math

import pytest
import torch
from gloo import process_group
from gloo import run_same_ranks as run_ranks
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_mp.ground.core.ranks import sum_over_ranks_
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.optimizer_step.loss_scaler import LossScaler

INF, NAN = float("inf"), float("nan")
SCALE = 4.0
LEARNING_RATE = 0.5
R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)

# For each parameter its mesh and the placements of its gradient; None is a plain tensor. The shapes do not divide
# evenly; a shard of the (1,) parameter is empty on all ranks but one.
SHAPES = [(5, 3), (1,), (6, 2), (3, 4), ()]
LINE, PLANE, ROWS, COLUMNS = "line", "plane", "rows", "columns"
LAYOUTS = {
    "plain tensors": (2, [None, None, None, None, None]),
    "partial sums": (2, [(LINE, [P]), (LINE, [S0]), (LINE, [P]), None, (LINE, [P])]),
    "all sharded": (2, [(LINE, [S0]), (LINE, [S0]), (LINE, [S1]), (LINE, [S0]), (LINE, [R])]),
    "replicated first, sharded later": (2, [(LINE, [R]), (LINE, [S0]), (LINE, [S0]), (LINE, [S1]), (LINE, [R])]),
    "plain and DTensors": (2, [None, (LINE, [S0]), (LINE, [R]), (LINE, [S1]), None]),
    "two meshes": (4, [(ROWS, [S0]), (PLANE, [S0, S0]), (PLANE, [S0, S1]), (PLANE, [R, S0]), (COLUMNS, [R])]),
    "two meshes, partial sums and plain": (4, [None, (COLUMNS, [S0]), (PLANE, [S0, P]), (PLANE, [P, S1]), (ROWS, [P])]),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def meshes(world_size):
    if world_size == 2:
        return {LINE: init_device_mesh("cpu", (2,))}
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {PLANE: plane, ROWS: plane["dp"], COLUMNS: plane["tp"]}


def whole_tensors():
    """Weights and gradients as a single process would hold them; multiples of 1/8."""
    generator = torch.Generator().manual_seed(5)
    weights, grads = (
        [torch.randint(-40, 40, shape, generator=generator) / 8 for shape in SHAPES] for _ in ("weights", "grads")
    )
    return weights, grads


def finished(placements):
    return [R if isinstance(p, Partial) else p for p in placements]


def spread(tensor, place, known_meshes):
    """This rank's piece of a gradient. Of a sum that is still to be made, the ranks hold 3 and -2 times the result."""
    if place is None:
        return tensor.clone()
    mesh, placements = known_meshes[place[0]], place[1]
    # Each rank splits its own piece: a broadcast from rank 0 would hide where a non-finite number is.
    local = distribute_tensor(tensor, mesh, finished(placements), src_data_rank=None).to_local().clone()
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            local = local * (3.0 if mesh.get_local_rank(axis) == 0 else -2.0)
    return DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride())


def make_parameters(layout, known_meshes, weights):
    places = [place if place is None else (place[0], finished(place[1])) for place in layout[1]]
    return [nn.Parameter(spread(w, place, known_meshes)) for w, place in zip(weights, places, strict=True)]


def set_gradients(parameters, layout, known_meshes, grads):
    for parameter, grad, place in zip(parameters, grads, layout[1], strict=True):
        parameter.grad = spread(grad, place, known_meshes)


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def global_norm(parameters, world_size):
    gradient_ops.reduce_partial_gradients_(parameters)
    shards = [gradient_ops.local_shard(p.grad) for p in parameters]
    copies = [
        gradient_ops.replicas(p.grad, ranks_per_parameter=world_size, plain_replicas=world_size) for p in parameters
    ]
    squares = gradient_ops.square_sum(gradient_ops.shard_norms(shards), copies)
    return sum_over_ranks_(squares).sqrt()


def on_ranks(layout, function):
    """Runs ``function(rank, known_meshes)`` on the layout's ranks."""

    def run(rank):
        with process_group():
            return function(rank, meshes(layout[0]))

    return run_ranks(run, layout[0])


@pytest.mark.quick_cases(3)
@layouts
def test_the_norm_is_that_of_one_process_on_every_rank(layout):
    """D20: torch's clip_grad_norm_ refuses plain tensors beside DTensors, and DTensors of two meshes."""
    weights, grads = whole_tensors()
    expected = math.sqrt(sum(g.double().square().sum().item() for g in grads))

    def measure(rank, known_meshes):
        parameters = make_parameters(layout, known_meshes, weights)
        set_gradients(parameters, layout, known_meshes, grads)
        norm = global_norm(parameters, layout[0])
        factor = gradient_ops.clip_coefficient(norm, 1.0)
        gradient_ops.multiply_([gradient_ops.local_shard(p.grad) for p in parameters], factor)
        return norm.item(), global_norm(parameters, layout[0]).item(), [whole(p.grad) for p in parameters]

    results = on_ranks(layout, measure)
    assert [norm for norm, _, _ in results] == pytest.approx([expected] * layout[0], rel=1e-6)
    assert len({norm for norm, _, _ in results}) == 1
    assert [clipped for _, clipped, _ in results] == pytest.approx([1.0] * layout[0], rel=1e-5)
    for _, _, clipped_grads in results:
        for clipped, grad in zip(clipped_grads, grads, strict=True):
            torch.testing.assert_close(clipped, grad / expected, rtol=1e-5, atol=0)


# -- one decision ------------------------------------------------------------------------------------------------------


def train_one_step(layout, known_meshes, scaler, grads, *, unscale_first, rank=0, plain_on=None):
    """Returns scale and weights after a step with these gradients times the scale."""
    weights, _ = whole_tensors()
    parameters = make_parameters(layout, known_meshes, weights)
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, foreach=False)
    scaler.scale(torch.ones(()))
    set_gradients(parameters, layout, known_meshes, [g * SCALE for g in grads])
    if plain_on is not None and rank != plain_on:
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), [whole(p) for p in parameters]


@pytest.mark.quick_cases(2)
@layouts
@pytest.mark.parametrize("unscale_first", [False, True])
def test_one_non_finite_element_anywhere_makes_every_rank_skip(layout, unscale_first):
    """D02, D03. Plain tensors may be shards too (FSDP1), so there the element is put on the last rank alone."""
    weights, grads = whole_tensors()
    places = [(index, element) for index in range(len(SHAPES)) for element in (0, -1)]

    def plant_everywhere(rank, known_meshes):
        outcomes = []
        for index, element in places:
            planted = [g.clone() for g in grads]
            planted[index].view(-1)[element] = INF if element else NAN
            scale, after = train_one_step(
                layout,
                known_meshes,
                LossScaler("cpu", init_scale=SCALE),
                planted,
                unscale_first=unscale_first,
                rank=rank,
                plain_on=layout[0] - 1,
            )
            outcomes.append((scale, all(map(torch.equal, after, weights))))
        healthy = train_one_step(
            layout, known_meshes, LossScaler("cpu", init_scale=SCALE), grads, unscale_first=unscale_first
        )
        return outcomes, healthy

    for outcomes, (scale, after) in on_ranks(layout, plant_everywhere):
        assert outcomes == [(SCALE / 2, True)] * len(places)
        assert scale == SCALE
        for stepped, weight, grad in zip(after, weights, grads, strict=True):
            assert torch.equal(stepped, weight - LEARNING_RATE * grad)


def test_finite_parts_of_a_sum_that_is_not_finite_make_every_rank_skip():
    layout = LAYOUTS["partial sums"]
    weights, grads = whole_tensors()

    def run(rank, known_meshes):
        scaler = LossScaler("cpu", init_scale=SCALE)
        scaler.scale(torch.ones(()))
        parameters = make_parameters(layout, known_meshes, weights)
        set_gradients(parameters, layout, known_meshes, grads)
        parameters[0].grad.to_local().fill_(3e38)
        optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), all(torch.equal(whole(p), w) for p, w in zip(parameters, weights, strict=True))

    assert on_ranks(layout, run) == [(SCALE / 2, True)] * 2


def test_a_rank_without_gradients_takes_part_in_the_decision():
    """A pipeline stage, or an expert that saw no token."""
    weights, grads = whole_tensors()

    def run(rank):
        with process_group():
            scaler = LossScaler("cpu", init_scale=SCALE)
            scaler.scale(torch.ones(()))
            scales = []
            for bad in (True, False):
                parameter = nn.Parameter(weights[0].clone())
                if rank == 1:
                    parameter.grad = grads[0] * (INF if bad else 1.0)
                scaler.step(torch.optim.SGD([parameter], lr=LEARNING_RATE))
                scaler.update()
                scales.append(scaler.get_scale())
            return scales

    assert run_ranks(run, 2) == [[SCALE / 2, SCALE / 2]] * 2


def fused_step(scaler, layout, known_meshes, grads, kernel="fused"):
    weights, _ = whole_tensors()
    parameters = make_parameters(layout, known_meshes, weights)
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, **{kernel: True})
    scaler.scale(torch.ones(()))
    set_gradients(parameters, layout, known_meshes, [g * SCALE for g in grads])
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), [whole(p) for p in parameters]


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.full
def test_ranks_agree_with_kernels_over_whole_lists(name, kernel):
    """D04, D21: torch's kernels refuse plain tensors beside DTensors, and DTensors of two meshes."""
    layout = LAYOUTS[name]
    weights, grads = whole_tensors()
    planted = [g.clone() for g in grads]
    planted[3].view(-1)[-1] = INF
    reference = [nn.Parameter(w.clone()) for w in weights]
    for parameter, grad in zip(reference, grads, strict=True):
        parameter.grad = grad
    torch.optim.AdamW(reference, lr=LEARNING_RATE, fused=True).step()

    def run(rank, known_meshes):
        skipped = fused_step(LossScaler("cpu", init_scale=SCALE), layout, known_meshes, planted, kernel)
        stepped = fused_step(LossScaler("cpu", init_scale=SCALE), layout, known_meshes, grads, kernel)
        return skipped, stepped

    for (skipped_scale, kept), (scale, after) in on_ranks(layout, run):
        assert (skipped_scale, scale) == (SCALE / 2, SCALE)
        assert all(map(torch.equal, kept, weights))
        for stepped, parameter in zip(after, reference, strict=True):
            torch.testing.assert_close(stepped, parameter.detach(), rtol=1e-6, atol=1e-6)


# -- what the stock scalers do in these places -------------------------------------------------------------------------


def test_torchs_grad_scaler_lets_ranks_drift_apart_where_the_first_gradient_is_replicated():
    """D02, the reason for this file: when it fails, torch has repaired it."""
    layout = LAYOUTS["replicated first, sharded later"]
    _, grads = whole_tensors()
    grads[3].view(-1)[-1] = INF

    def run(rank, known_meshes):
        scaler = GradScaler("cpu", init_scale=SCALE)
        return train_one_step(layout, known_meshes, scaler, grads, unscale_first=False)[0]

    assert on_ranks(layout, run) == [SCALE, SCALE / 2]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make_scaler", [GradScaler, ShardedGradScaler])
def test_torchs_scalers_refuse_plain_tensors_beside_dtensors(make_scaler):
    """D03."""
    layout = LAYOUTS["plain and DTensors"]
    _, grads = whole_tensors()

    def run(rank, known_meshes):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            train_one_step(layout, known_meshes, make_scaler("cpu", init_scale=SCALE), grads, unscale_first=False)

    on_ranks(layout, run)


def test_torchs_fused_kernel_refuses_plain_tensors_beside_dtensors():
    """D21: what ``one_mesh_per_group`` is for."""
    layout = LAYOUTS["plain and DTensors"]
    _, grads = whole_tensors()

    def run(rank, known_meshes):
        parameters = make_parameters(layout, known_meshes, whole_tensors()[0])
        set_gradients(parameters, layout, known_meshes, grads)
        with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
            torch.optim.AdamW(parameters, fused=True).step()

    on_ranks(layout, run)


def test_torchs_sharded_grad_scaler_lets_ranks_drift_apart_with_a_fused_optimizer():
    """D04: plain tensors that are shards, as under FSDP1."""

    def scales(make_scaler):
        def run(rank):
            with process_group():
                parameter = nn.Parameter(torch.ones(2))
                parameter.grad = torch.full((2,), INF if rank == 1 else 1.0)
                scaler = make_scaler("cpu", init_scale=SCALE)
                scaler.scale(torch.ones(()))
                scaler.step(torch.optim.AdamW([parameter], fused=True))
                scaler.update()
                return scaler.get_scale()

        return run_ranks(run, 2)

    assert scales(ShardedGradScaler) == [SCALE, SCALE / 2]
    assert scales(LossScaler) == [SCALE / 2, SCALE / 2]
