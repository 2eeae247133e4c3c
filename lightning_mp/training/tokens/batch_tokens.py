"""How much a batch weighs: its samples and its target tokens, and how to hide tokens from the loss."""

from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_mp.ground.core.nested_tensors import tensors_in

#: Label that the loss leaves out: the default ``ignore_index`` of ``torch.nn.functional.cross_entropy``.
IGNORE_INDEX = -100

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_COUNT_ITEMS = (
    "Pass AccumulationScheduler count=, a function from a batch to its number of items, without weight_by='sample'; or"
    " weight_by='batch'. Thresholds and targets can then be in steps or tokens."
)

# Class names of Hugging Face models whose loss can shift labels (transformers 5, `ForCausalLMLoss`).
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def no_tokens_in(batch: Any, owner: str, otherwise: str = "") -> MisconfigurationException:
    """The refusal of a batch whose tokens ``owner`` cannot count; ``otherwise`` is what else ``count=`` may give."""
    keys = f" with the keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
    return MisconfigurationException(
        f"{owner} cannot count tokens in a batch of type {type(batch).__name__!r}{keys}: there is no integer tensor"
        " with two dimensions or more at batch['labels'] or batch[1]. Pass count=, a function from a batch to its"
        f" number of tokens{otherwise}."
    )


def find_labels(batch: Any) -> Tensor | None:
    """The token labels of a batch, or None.

    They are ``batch["labels"]`` of a mapping, or the second entry of a list or tuple, if that is an integer tensor with
    two dimensions or more, ``[batch, tokens, ...]``. One-dimensional labels are classes of whole samples, not tokens.
    """
    candidate: Any = None
    if isinstance(batch, Mapping):
        candidate = batch.get("labels")
    elif isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) > 1:
        candidate = batch[1]
    if not isinstance(candidate, Tensor) or candidate.dtype not in _INTEGERS or candidate.ndim < 2:
        return None
    return candidate


def shifts_labels_inside(module: nn.Module, batch: Any) -> bool:
    """Whether a Hugging Face model in the module shifts the labels of such a batch by itself.

    A causal language model given ``labels`` that repeat its ``input_ids`` compares position ``t`` with label ``t + 1``,
    so that ``labels[:, 0]`` bears no loss. Labels that differ from the inputs (shifted already, masked language models,
    translation) are used as they are.
    """
    labels = find_labels(batch)
    input_ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if labels is None or not isinstance(input_ids, Tensor) or input_ids.shape != labels.shape:
        return False
    if not bool(((labels == input_ids) | (labels == IGNORE_INDEX)).all()):
        return False
    return any(_is_causal(submodule) for submodule in module.modules())


def _is_causal(module: nn.Module) -> bool:
    names = [cls.__name__ for cls in type(module).__mro__]
    if "PreTrainedModel" not in names or not any(name.endswith(_CAUSAL_SUFFIXES) for name in names):
        return False
    return not getattr(module.config, "is_encoder_decoder", False)


def loss_bearing(labels: Tensor, *, shifted: bool) -> Tensor:
    """Boolean mask of the labels that reach the loss, same shape as ``labels``.

    >>> import torch
    >>> loss_bearing(torch.tensor([[5, -100, 7]]), shifted=True)
    tensor([[False, False,  True]])
    """
    mask = labels != IGNORE_INDEX
    if shifted:
        mask[:, 0] = False
    return mask


def count_samples(batch: Any, instead: str = _COUNT_ITEMS) -> int:
    """Size of the first dimension of the first tensor in the batch, whatever the sizes of the others.

    Of a batch that lists its samples it is how many it lists (:func:`listed_samples`).

    >>> import torch
    >>> count_samples({"x": torch.zeros(3, 5)})
    3
    """
    listed = listed_samples(batch)
    if listed is not None:
        return listed
    for tensor in tensors_in(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise ValueError(
        f"No samples can be counted in a batch of type {type(batch).__name__!r}: it holds no tensor with a batch"
        f" dimension. {instead}"
    )


def listed_samples(batch: Any) -> int | None:
    """How many samples a batch lists, one mapping for each, as detection does: ``(images, targets)``.

    The first tensor is then one of as many images, or has as many rows. None for any other batch, also for a mere list
    of tensors, which may hold inputs and targets.

    >>> import torch
    >>> images = [torch.zeros(3, 8, 8), torch.zeros(3, 6, 8)]
    >>> listed_samples((images, [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}]))
    2
    >>> listed_samples(images) is None
    True
    """
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, list | tuple):
        return None
    numbers = {len(entry) for entry in batch if _lists(entry, Mapping)}
    if len(numbers) != 1:
        return None
    first: Any = next((entry for entry in batch if any(tensor.ndim for tensor in tensors_in(entry))), None)
    listed = len(first) if isinstance(first, Tensor) or _lists(first, Tensor) else None
    return listed if listed in numbers else None


def _lists(entry: Any, kind: type) -> bool:
    """Whether it is a list of nothing but these."""
    return isinstance(entry, list | tuple) and bool(entry) and all(isinstance(one, kind) for one in entry)


def declared_divisor(batch: Any) -> int | Tensor | None:
    """What a batch says its loss is divided by: ``batch["num_items_in_batch"]``, as Hugging Face models take it.

    Their loss is then a sum over tokens divided by that number, not a mean over the tokens of this batch.

    >>> declared_divisor({"num_items_in_batch": 96}), declared_divisor([1, 2])
    (96, None)
    """
    declared = batch.get("num_items_in_batch") if isinstance(batch, Mapping) else None
    if declared is None or isinstance(declared, Tensor):
        return declared
    return int(declared)


def nonpad_tokens(batch: Any) -> Tensor | None:
    """Tokens that are no padding, a scalar tensor; None if that is not known.

    Padding is what ``batch["attention_mask"]`` hides. Without a mask it is the end of a row in which one input token is
    repeated, two times or more, and has no label.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is not None:
        # Two dimensions, [batch, tokens]; a mask with more says which tokens attend to which.
        return (mask != 0).sum() if isinstance(mask, Tensor) and mask.ndim == 2 else None
    labels = find_labels(batch)
    inputs = batch.get("input_ids") if isinstance(batch, Mapping) else batch[0] if labels is not None else None
    if labels is None or not isinstance(inputs, Tensor) or labels.ndim != 2 or inputs.shape != labels.shape:
        return None
    length = labels.shape[1]
    if inputs.is_floating_point() or not length:
        return None
    is_token = (labels != IGNORE_INDEX) | (inputs != inputs[:, -1:])
    ends = (torch.arange(1, length + 1, device=labels.device) * is_token).amax(1)
    return torch.where(ends >= length - 1, length, ends).sum()


def shown_tokens(batch: Any) -> int | None:
    """Tokens in the inputs, padding included, by the shape of the labels or of the mask; None without both.

    >>> shown_tokens({"attention_mask": torch.ones(2, 5)})
    10
    """
    labels = find_labels(batch)
    if labels is not None:
        return labels.numel()
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.numel() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def replaceable_labels(batch: Any) -> bool:
    """Whether the labels of this batch can be exchanged: they sit in a mutable mapping or list."""
    return find_labels(batch) is not None and isinstance(batch, MutableMapping | MutableSequence)


def trim_labels_(batch: Any, keep_tokens: int, *, shifted: bool) -> Tensor:
    """Hides all but the first ``keep_tokens`` target tokens of a batch from the loss.

    The label tensor is exchanged in its container, never written to: it may be a view of the data set.
    """
    labels = find_labels(batch)
    assert labels is not None
    mask = loss_bearing(labels, shifted=shifted)
    position = mask.flatten().cumsum(0).view_as(labels)
    # Bytes as labels cannot hold -100.
    signed = labels.long() if labels.dtype == torch.uint8 else labels
    trimmed = torch.where(mask & (position > keep_tokens), IGNORE_INDEX, signed)
    replace_labels_(batch, trimmed)
    return labels


def replace_labels_(batch: Any, labels: Tensor) -> None:
    """Puts other labels into a batch with :func:`replaceable_labels`."""
    if isinstance(batch, MutableMapping):
        batch["labels"] = labels
    else:
        batch[1] = labels
