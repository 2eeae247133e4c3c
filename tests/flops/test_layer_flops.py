"""FLOPs of layers that run as one operation: recurrent layers, and those that are named as unknown."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_mp.ground.flops.flop_counter import count_flops
from lightning_mp.ground.flops.flop_tally import FlopTally
from lightning_mp.ground.flops.operation_flops import operation_flops

BATCH, TIME, SIZE, HIDDEN = 4, 6, 5, 7
GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


def recurrent_flops(module: nn.RNNBase, tokens: int = BATCH * TIME, *, input_asked: bool = True) -> int:
    """Forward and backward by hand, without the gradient of the initial state, which is the zeros of torch."""
    gates, directions = GATES[type(module)], 1 + module.bidirectional  # type: ignore[index]
    out = module.proj_size or HIDDEN
    total = 0
    for layer in range(module.num_layers):
        size = directions * out if layer else SIZE
        from_input, from_hidden = gates * HIDDEN * size, gates * HIDDEN * out
        projection = HIDDEN * module.proj_size
        products = 3 * tokens * (from_input + from_hidden + projection) - BATCH * from_hidden
        total += 2 * directions * (products - (0 if layer or input_asked else tokens * from_input))
    return total


def as_it_ran(module: nn.Module, *inputs: Tensor) -> int:
    with FlopTally() as tally:
        output = module(*inputs)
        (output if isinstance(output, Tensor) else output[0]).sum().backward()
    assert tally.count.unknown == ()
    return tally.count.model


@pytest.mark.parametrize("input_asked", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"num_layers": 3, "bias": False}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_counts_the_same_as_by_hand(
    kind: Callable[..., nn.RNNBase], options: dict[str, int], input_asked: bool
) -> None:
    module = kind(SIZE, HIDDEN, batch_first=True, **options)
    batch = torch.zeros(BATCH, TIME, SIZE, requires_grad=input_asked)
    by_hand = recurrent_flops(module, input_asked=input_asked)
    if kind is not nn.LSTM:  # on a CPU one operation of oneDNN
        assert as_it_ran(module, batch) == by_hand
    if not input_asked:  # a batch has no gradient there
        assert count_flops(module, batch, lambda module, batch: module(batch)[0].sum()).model == by_hand


def test_frozen_weights_of_a_recurrent_layer_have_no_products_for_their_gradient() -> None:
    module = nn.GRU(SIZE, HIDDEN, batch_first=True).requires_grad_(False)
    batch = torch.zeros(BATCH, TIME, SIZE, requires_grad=True)
    trained = recurrent_flops(module)
    weights = 2 * BATCH * TIME * 3 * HIDDEN * (SIZE + HIDDEN)
    assert as_it_ran(module, batch) == trained - weights


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("projection", [0, 3])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_formula_of_cudnn_by_its_schema(layers: int, projection: int, directions: int, packed: bool) -> None:
    """No CPU runs cuDNN, so the arguments of `_cudnn_rnn` (and of MIOpen, alike) are written down here."""
    module = nn.LSTM(SIZE, HIDDEN, layers, proj_size=projection, bidirectional=directions == 2)
    weights = list(module.parameters())
    batch, sizes = torch.zeros(TIME, BATCH, SIZE), []
    if packed:
        sequences = pack_padded_sequence(batch, [6, 5, 4, 1])
        batch, sizes = sequences.data, sequences.batch_sizes.tolist()
    out = projection or HIDDEN
    hidden, cell = torch.zeros(layers * directions, BATCH, out), torch.zeros(layers * directions, BATCH, HIDDEN)
    stride = len(weights) // (layers * directions)
    rest = (2, HIDDEN, projection, layers, False, 0.0, True, directions == 2, sizes, None)
    forward = operation_flops(torch.ops.aten._cudnn_rnn, (batch, weights, stride, None, hidden, cell, *rest), {}, None)
    start = (batch, weights, stride, torch.zeros(0), hidden, cell, batch, None, None, None)
    for input_asked in (True, False):
        mask = [input_asked, False, False, True]
        backward = operation_flops(torch.ops.aten._cudnn_rnn_backward, (*start, *rest, torch.zeros(0), mask), {}, None)
        assert forward is not None
        assert backward is not None
        tokens = 16 if packed else BATCH * TIME
        assert forward + backward == recurrent_flops(module, tokens, input_asked=input_asked)


def sparse_matrix(rows: int = 8, columns: int = 8) -> Tensor:
    dense = torch.zeros(rows, columns)
    dense[0], dense[:, 1] = 1, 2
    return dense.to_sparse()


def test_small_products_are_counted() -> None:
    left, right = torch.ones(2, 8, 9), torch.ones(2, 9, 10)
    for product, flops in (
        (lambda: torch.dot(left[0, 0], left[0, 1]), 2 * 9),
        (lambda: torch.addbmm(torch.zeros(8, 10), left, right), 2 * 2 * 8 * 9 * 10),
    ):
        with FlopTally() as tally:
            product()
        assert (tally.count.forward, tally.count.unknown) == (flops, ())


def test_products_of_integers_are_not_floating_point_operations() -> None:
    numbers = torch.ones(3, 3, dtype=torch.int64)
    with FlopTally() as tally:
        numbers @ numbers
        torch.dot(numbers[0], numbers[1])
    assert (tally.count.model, tally.count.unknown) == (0, ())


@pytest.mark.parametrize(
    ("product", "name"),
    [
        (lambda: torch.fft.rfft(torch.ones(16)), "aten::_fft_r2c"),
        (lambda: nn.Bilinear(5, 6, 7)(torch.ones(1, 5), torch.ones(1, 6)), "aten::_trilinear"),
        (lambda: torch.cdist(torch.ones(30, 9), torch.ones(40, 9)), "aten::_euclidean_dist"),
        (lambda: nn.LSTM(SIZE, HIDDEN)(torch.zeros(TIME, BATCH, SIZE)), "aten::mkldnn_rnn_layer"),
        (lambda: torch.linalg.solve(torch.eye(3), torch.ones(3)), "aten::_linalg_solve_ex"),
        (lambda: torch.sparse.mm(sparse_matrix(), sparse_matrix()), "aten::_sparse_sparse_matmul"),
        (lambda: sparse_matrix().to_sparse_csr() @ sparse_matrix().to_sparse_csr(), "aten::mm"),
        (lambda: sparse_matrix().to_sparse_csr() @ torch.ones(8, 9), "aten::mm"),
        (lambda: torch.addmm(torch.zeros(8, 9), sparse_matrix(), torch.ones(8, 9)), "aten::addmm"),
        (lambda: sparse_matrix() @ torch.ones(8, 9), "aten::mm"),
        (
            lambda: torch.sparse.sampled_addmm(sparse_matrix().to_sparse_csr(), *[torch.ones(8, 8)] * 2),
            "aten::sparse_sampled_addmm",
        ),
    ],
)
def test_operations_of_torch_that_multiply_without_a_formula_are_named(
    product: Callable[[], Tensor], name: str
) -> None:
    with warnings.catch_warnings(), FlopTally() as tally:
        warnings.simplefilter("ignore", UserWarning)
        product()
    assert tally.count.unknown == (name,)
    assert tally.count.model == 0
