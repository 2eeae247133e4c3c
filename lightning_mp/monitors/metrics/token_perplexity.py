"""Perplexity over tokens: exact counts, safe for logits of any size."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_mp.ground.core.devices import accumulation_dtype

_CHUNK_LOGITS = 2**24


def token_perplexity(logits: Tensor, target: Tensor, ignore_index: int | None = -100) -> Tensor:
    r"""Perplexity of a batch of next-token predictions.

    .. math:: \exp\Big(\frac1n \sum_i -\log p_i\Big), \qquad
              -\log p_i = \log \sum_v e^{z_{i,v}} - z_{i,y_i}

    over the ``n`` tokens whose target is not ``ignore_index``; the logarithm is natural, so this is the exponential of
    the mean cross-entropy.

    Args:
        logits: scores before softmax, shape ``[..., vocabulary]``; 16-bit logits are computed in float32.
        target: token ids, integers of shape ``[...]``. For a language model, shift them first:
            ``token_perplexity(logits[:, :-1], tokens[:, 1:])``.
        ignore_index: target to ignore, as in ``torch.nn.functional.cross_entropy``; None counts all.

    Returns:
        Scalar tensor, float64 (float32 on MPS); nan if no token counts.

    Raises:
        ValueError: if the shapes do not match or a dtype is wrong.

    References:
        Jelinek et al., "Perplexity - a measure of the difficulty of speech recognition tasks", JASA 62, 1977.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[[0.0, 0.0], [1e4, -1e4], [3.0, 1.0]]])
        >>> token_perplexity(logits, torch.tensor([[1, 0, -100]]))
        tensor(1.4142, dtype=torch.float64)
    """
    total, tokens = _count(logits, target, ignore_index)
    return (total / tokens).exp()


class TokenPerplexity(Metric):
    """Perplexity over all tokens of all batches and ranks, each token with the same weight.

    Unlike ``torchmetrics.text.Perplexity`` it counts tokens in int64, which stays exact past 2^24 tokens, sums in
    float64, and uses log-sum-exp instead of the logarithm of a softmax, which underflows for unlikely tokens. Its
    temporaries are small for any batch. Nothing waits for the device before ``compute``.

    Args:
        ignore_index: target to ignore; None counts all.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: if ``ignore_index`` is not an integer or None.

    Example:
        >>> import torch
        >>> metric = TokenPerplexity()
        >>> metric.update(torch.zeros(2, 3, 5), torch.tensor([[1, 2, -100], [4, -100, -100]]))
        >>> metric.compute()
        tensor(5.0000, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 1.0
    negative_log_likelihood: Tensor
    tokens: Tensor

    def __init__(self, ignore_index: int | None = -100, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if ignore_index is not None and (not isinstance(ignore_index, int) or isinstance(ignore_index, bool)):
            raise ValueError(
                f"TokenPerplexity(ignore_index={ignore_index!r}) is not valid: it must be an integer, such as -100, or"
                " None to count all tokens."
            )
        self.ignore_index = ignore_index
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        total = torch.zeros((), dtype=accumulation_dtype(device))
        self.add_state("negative_log_likelihood", total, dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, logits: Tensor, target: Tensor) -> None:
        """Adds a batch; see :func:`token_perplexity`."""
        total, tokens = _count(logits, target, self.ignore_index)
        self.negative_log_likelihood += total
        self.tokens += tokens

    @override
    def compute(self) -> Tensor:
        """The perplexity so far; nan if no token counted."""
        return (self.negative_log_likelihood / self.tokens).exp()


@torch.no_grad()
def _count(logits: Tensor, target: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    _check(logits, target)
    vocabulary = logits.shape[-1]
    wide = accumulation_dtype(logits.device)
    labels = target.detach().reshape(-1).long()
    counted = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    labels = torch.where(counted, labels, 0)
    total = torch.zeros((), dtype=wide, device=logits.device)
    rows_per_chunk = max(1, _CHUNK_LOGITS // vocabulary)
    scores = logits.detach().reshape(-1, vocabulary)
    for rows, indices, counts in zip(
        scores.split(rows_per_chunk), labels.split(rows_per_chunk), counted.split(rows_per_chunk), strict=True
    ):
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        log_sum = torch.logsumexp(rows, 1).to(wide)
        chosen = rows.gather(1, indices[:, None]).squeeze(1).to(wide)
        # Not a product: what is ignored may be infinite.
        total += torch.where(counts, log_sum - chosen, 0.0).sum()
    return total, counted.sum()


def _check(logits: Tensor, target: Tensor) -> None:
    if not logits.is_floating_point():
        raise ValueError(f"`logits` must be floating point, shape [..., vocabulary], got dtype {logits.dtype}.")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"`target` must hold token ids as integers, got dtype {target.dtype}.")
    if logits.ndim < 1 or logits.shape[:-1] != target.shape:
        raise ValueError(
            "`logits` must have the shape of `target` and one more dimension, the vocabulary; got"
            f" {tuple(logits.shape)} and {tuple(target.shape)}. A next-token model is shifted first:"
            " logits[:, :-1], tokens[:, 1:]."
        )
