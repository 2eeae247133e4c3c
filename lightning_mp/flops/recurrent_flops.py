r"""Operations of fused recurrent layers: ``_cudnn_rnn``, ``miopen_rnn`` and ``mkldnn_rnn_layer``.

Where no fused kernel serves (a GRU on the CPU, the meta device), a layer runs as products that are counted one by one.
A fused kernel multiplies each weight matrix, of the input, of the hidden state and of the projection (``proj_size``),
with every token: 2 x tokens x elements, summed over layers and directions. Its backward takes that twice, for the
gradients of weights and of what they are multiplied with. Gradients that nobody needs are not part of the model's
operations: those of frozen weights, of an input without gradient, and of the initial hidden state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


def _products(matrices: Sequence[Tensor], rows: int) -> int:
    return 2 * rows * sum(matrix.numel() for matrix in matrices)


def _rows(input: Tensor) -> int:
    """Tokens of a batch, padded ``[time, batch, size]`` or packed ``[tokens, size]``."""
    return input.numel() // max(input.shape[-1], 1)


def _backward(
    input: Tensor,
    hidden: Tensor,
    matrices: Sequence[Tensor],
    from_input: Sequence[Tensor],
    from_hidden: Sequence[Tensor],
    asked: tuple[bool, bool, bool],
) -> int:
    """Both gradients of each product, less those that nobody needs."""
    rows = _rows(input)
    input_asked, hidden_asked, weights_asked = asked
    total = _products(matrices, rows) * (1 + weights_asked)
    total -= 0 if input_asked else _products(from_input, rows)
    return total - (0 if hidden_asked else _products(from_hidden, hidden.shape[-2]))


def _cudnn(input: Tensor, weight: Sequence[Tensor], *args: Any, **kwargs: Any) -> int:
    return _products([part for part in weight if part.ndim == 2], _rows(input))


def _cudnn_backward(
    input: Tensor, weight: Sequence[Tensor], stride: int, buffer: Tensor, hidden: Tensor, *args: Any, **kwargs: Any
) -> int:
    # Layer by layer and direction by direction, each with `stride` parts: input, hidden, biases, projection.
    bidirectional, output_mask = args[-5], args[-1]
    cells = [weight[first : first + stride] for first in range(0, len(weight), stride)]
    return _backward(
        input,
        hidden,
        [part for part in weight if part.ndim == 2],
        [cell[0] for cell in cells[: 1 + bidirectional]],
        [cell[1] for cell in cells],
        (output_mask[0], output_mask[1], output_mask[3]),
    )


def _mkldnn(input: Tensor, weight_input: Tensor, weight_hidden: Tensor, *args: Any, **kwargs: Any) -> int:
    return _products([weight_input, weight_hidden], _rows(input))


def _mkldnn_backward(
    input: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    hidden: Tensor,
    *args: Any,
    **kwargs: Any,
) -> int:
    # One layer in one direction. The operation has no output mask; what autograd saved knows who needs a gradient.
    return _backward(
        input,
        hidden,
        [weight_input, weight_hidden],
        [weight_input],
        [weight_hidden],
        (input.requires_grad, hidden.requires_grad, weight_input.requires_grad),
    )


RECURRENT_FORMULAS: Mapping[str, Callable[..., int]] = {
    "_cudnn_rnn": _cudnn,
    "_cudnn_rnn_backward": _cudnn_backward,
    "miopen_rnn": _cudnn,
    "miopen_rnn_backward": _cudnn_backward,
    "mkldnn_rnn_layer": _mkldnn,
    "mkldnn_rnn_layer_backward": _mkldnn_backward,
}
