"""What a batch weighs, and hiding its surplus labels, on the kinds of batches that people have."""

from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_mp.training.tokens.batch_tokens import (
    IGNORE_INDEX,
    count_samples,
    find_labels,
    loss_bearing,
    replace_labels_,
    replaceable_labels,
    shifts_labels_inside,
    trim_labels_,
)
from lightning_mp.training.tokens.ragged_batches import rows_differ

TOKENS = torch.tensor([[1, 2, IGNORE_INDEX], [3, IGNORE_INDEX, 5]])
INPUTS = torch.zeros(2, 3)
Pair = namedtuple("Pair", ["inputs", "labels"])

MUTABLE = {
    "list": lambda labels: [INPUTS, labels],
    "longer list": lambda labels: [INPUTS, labels, torch.ones(2)],
    "dict": lambda labels: {"input_ids": INPUTS, "labels": labels},
    "ordered dict": lambda labels: OrderedDict(labels=labels, input_ids=INPUTS),
    "a mapping of its own class, as Hugging Face's": lambda labels: UserDict(labels=labels),
}
IMMUTABLE = {
    "tuple": lambda labels: (INPUTS, labels),
    "named tuple": lambda labels: Pair(INPUTS, labels),
    "read-only mapping": lambda labels: MappingProxyType({"labels": labels}),
}
WITHOUT_TOKENS = {
    "tensor": TOKENS,
    "list of one": [TOKENS],
    "classes of whole samples": [INPUTS, torch.tensor([1, 0])],
    "real targets": [INPUTS, torch.zeros(2, 3)],
    "16-bit targets": [INPUTS, torch.zeros(2, 3, dtype=torch.bfloat16)],
    "a scalar": [INPUTS, torch.tensor(3)],
    "a mapping without labels": {"input_ids": TOKENS, "targets": TOKENS},
    "labels that are no tensor": {"labels": [[1, 2]]},
    "lists": [[1, 2], [3, 4]],
    "text": "ab",
    "texts": ["ab", "cd"],
    "nothing": None,
    "empty list": [],
    "a mask": [INPUTS, torch.ones(2, 3, dtype=torch.bool)],
    "complex targets": [INPUTS, torch.ones(2, 3, dtype=torch.complex64)],
}


def labels_of(batch):
    return batch["labels"] if hasattr(batch, "keys") else batch[1]


# -- finding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*MUTABLE.values(), *IMMUTABLE.values()], ids=[*MUTABLE, *IMMUTABLE])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_token_labels_are_found(make, dtype):
    labels = TOKENS.to(dtype)
    assert find_labels(make(labels)) is labels


def test_labels_of_more_than_two_dimensions_are_tokens_too():
    labels = torch.zeros(2, 3, 4, dtype=torch.long)
    assert find_labels([INPUTS, labels]) is labels


@pytest.mark.parametrize("batch", WITHOUT_TOKENS.values(), ids=WITHOUT_TOKENS)
def test_where_there_are_no_token_labels_none_are_found(batch):
    assert find_labels(batch) is None
    assert not replaceable_labels(batch)


@pytest.mark.parametrize("make", MUTABLE.values(), ids=MUTABLE)
def test_labels_in_a_mutable_batch_can_be_exchanged(make):
    assert replaceable_labels(make(TOKENS))


@pytest.mark.parametrize("make", IMMUTABLE.values(), ids=IMMUTABLE)
def test_labels_in_an_immutable_batch_cannot_be_exchanged(make):
    assert not replaceable_labels(make(TOKENS))


# -- counting ----------------------------------------------------------------------------------------------------------


def test_ignored_labels_bear_no_loss():
    assert nn.CrossEntropyLoss().ignore_index == IGNORE_INDEX
    assert loss_bearing(TOKENS, shifted=False).tolist() == [[True, True, False], [True, False, True]]
    assert loss_bearing(TOKENS, shifted=True).tolist() == [[False, True, False], [False, False, True]]


def test_counting_does_not_change_the_labels():
    labels = TOKENS.clone()
    loss_bearing(labels, shifted=True)
    assert torch.equal(labels, TOKENS)


@given(st.integers(1, 4), st.integers(1, 6), st.booleans(), st.randoms(use_true_random=False))
def test_the_mask_counts_exactly_the_tokens_that_the_loss_averages_over(rows, columns, shifted, random):
    """Against cross-entropy itself: each target label adds its own gradient, so the sum loss counts them."""
    labels = torch.tensor([[random.choice([0, 1, IGNORE_INDEX]) for _ in range(columns)] for _ in range(rows)])
    logits = torch.zeros(rows, columns, 2)
    if shifted:  # as Hugging Face's causal models do
        logits, used = logits[:, :-1], labels[:, 1:]
    else:
        used = labels
    summed = nn.functional.cross_entropy(logits.flatten(0, 1), used.flatten(), reduction="sum")
    counted = loss_bearing(labels, shifted=shifted).sum().item()
    assert counted == pytest.approx(summed.item() / torch.log(torch.tensor(2.0)).item(), abs=1e-4)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(4, 2), 4),
        ([torch.zeros(5), torch.zeros(3)], 5),
        ((torch.tensor(1.0), torch.zeros(6, 2)), 6),
        ({"name": "x", "scale": torch.tensor(2.0), "x": torch.zeros(7, 1)}, 7),
        (UserDict(x=torch.zeros(8)), 8),
        ([["a", "b"], {"x": [torch.zeros(9)]}], 9),
        (Pair(torch.zeros(2, 3), torch.zeros(2)), 2),
        (torch.zeros(0, 3), 0),
        ([torch.zeros(3, 8, 8)] * 4, 3),
        ([{"x": torch.zeros(5)}, {"x": torch.zeros(7)}], 5),
        ([[torch.zeros(5), torch.zeros(5)], [{"x": torch.zeros(7)}]], 5),
    ],
    ids=str,
)
def test_samples_are_the_first_dimension_of_the_first_tensor_that_has_one(batch, samples):
    assert count_samples(batch) == samples


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("pack", [list, tuple])
@pytest.mark.parametrize(
    "make",
    [
        lambda images, targets: (images, targets),
        lambda images, targets: [0.5, torch.tensor(0.5), images, targets, ["a"] * len(images)],
        lambda images, targets: {"images": images, "targets": targets},
        lambda images, targets: {"pixel_values": torch.stack(list(images)), "labels": targets},
    ],
    ids=["detection", "with more", "mapping", "stacked"],
)
def test_samples_are_those_that_a_batch_lists(make, pack, count):
    """One mapping of targets for each; three channels are no three samples."""
    images = pack(torch.zeros(3, 8, 8) for _ in range(count))
    targets = pack({"boxes": torch.zeros(boxes, 4), "labels": torch.zeros(boxes)} for boxes in range(count))
    batch = make(images, targets)
    assert count_samples(batch) == count
    assert not rows_differ(batch)


@pytest.mark.parametrize("batch", ["text", ["a"], {}, [], None, 3, torch.tensor(1.0), [torch.tensor(1.0)]], ids=str)
def test_a_batch_without_a_batch_dimension_is_refused(batch):
    message = (
        rf"^No samples can be counted in a batch of type '{type(batch).__name__}': it holds no tensor with a batch"
        r" dimension\. Pass AccumulationScheduler count=, a function from a batch to its number of items, without"
        r" weight_by='sample'; or weight_by='batch'\. Thresholds and targets can then be in steps or tokens\.$"
    )
    with pytest.raises(ValueError, match=message):
        count_samples(batch)


# -- models that shift -------------------------------------------------------------------------------------------------

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
CAUSAL_BATCH = {"input_ids": IDS, "labels": IDS}


def hugging_face(name, *, base=None, is_encoder_decoder=False):
    """A module with the class names that Hugging Face's models have."""
    pretrained = base or type("PreTrainedModel", (nn.Module,), {})
    model = type(name, (pretrained,), {})()
    model.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
    return model


@pytest.mark.parametrize(
    ("model", "shifts"),
    [
        (hugging_face("LlamaForCausalLM"), True),
        (hugging_face("GPT2LMHeadModel"), True),
        (hugging_face("LlavaForConditionalGeneration"), True),
        (nn.Sequential(nn.Linear(2, 2), hugging_face("LlamaForCausalLM")), True),
        (hugging_face("T5ForConditionalGeneration", is_encoder_decoder=True), False),
        (hugging_face("BertForMaskedLM"), False),
        (hugging_face("LlamaForSequenceClassification"), False),
        (hugging_face("MyForCausalLM", base=nn.Module), False),
        (nn.Linear(2, 2), False),
        # somebody's own class over a causal model still shifts
        (hugging_face("MyLlama", base=type(hugging_face("LlamaForCausalLM"))), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_hugging_faces_causal_models_shift_their_labels_and_no_others(model, shifts):
    assert shifts_labels_inside(model, CAUSAL_BATCH) is shifts


@pytest.mark.parametrize(
    ("batch", "shifts"),
    [
        (CAUSAL_BATCH, True),
        (UserDict(CAUSAL_BATCH), True),
        ({"input_ids": IDS, "labels": IDS.masked_fill(IDS % 2 == 0, IGNORE_INDEX)}, True),
        ({"input_ids": IDS, "labels": IDS.roll(-1, 1)}, False),
        ({"input_ids": IDS, "labels": IDS[:, :2]}, False),
        ({"input_ids": IDS}, False),
        ({"labels": IDS}, False),
        (IDS, False),
    ],
    ids=["repeated", "own mapping", "partly hidden", "shifted already", "shorter", "no labels", "no inputs", "tensor"],
)
def test_only_labels_that_repeat_the_inputs_are_taken_to_be_shifted_by_the_model(batch, shifts):
    assert shifts_labels_inside(hugging_face("LlamaForCausalLM"), batch) is shifts


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"])
def test_the_answer_is_right_for_the_real_models(name):
    """By the loss that the model itself computes: another first label changes nothing if it shifts."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 11, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    tiny = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8}
    configs = {
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, **small),
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(**tiny, **small),
        "BertForMaskedLM": lambda: transformers.BertConfig(**tiny, **small),
    }
    model = getattr(transformers, name)(configs[name]()).eval()
    ids = torch.randint(11, (2, 6))
    moved = ids.clone()
    moved[:, 0] = (moved[:, 0] + 1) % 11
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=labels).loss for labels in (ids, moved)]
    assert shifts_labels_inside(model, {"input_ids": ids, "labels": ids}) == torch.equal(*losses)


# -- trimming ----------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 30),
    st.booleans(),
    st.sampled_from(list(MUTABLE)),
    st.randoms(use_true_random=False),
)
def test_trimming_keeps_the_first_tokens_and_nothing_else_changes(rows, columns, keep, shifted, kind, random):
    labels = torch.tensor([[random.choice([0, 1, 2, IGNORE_INDEX]) for _ in range(columns)] for _ in range(rows)])
    before = labels.clone()
    batch = MUTABLE[kind](labels)
    others = [value for value in (batch.values() if hasattr(batch, "values") else batch) if value is not labels]
    bearing = loss_bearing(labels, shifted=shifted)

    assert trim_labels_(batch, keep, shifted=shifted) is labels

    trimmed = labels_of(batch)
    assert torch.equal(labels, before)  # it may be a view of the data set
    assert (trimmed.shape, trimmed.dtype) == (labels.shape, labels.dtype)
    kept = loss_bearing(trimmed, shifted=shifted)
    positions = bearing.flatten().nonzero().flatten()[:keep]
    assert torch.equal(kept.flatten().nonzero().flatten(), positions)
    assert torch.equal(trimmed[~bearing | kept], before[~bearing | kept])
    assert (trimmed[bearing & ~kept] == IGNORE_INDEX).all()
    after = [value for value in (batch.values() if hasattr(batch, "values") else batch) if value is not trimmed]
    assert all(a is b for a, b in zip(after, others, strict=True))
    replace_labels_(batch, labels)
    assert labels_of(batch) is labels


@pytest.mark.parametrize(
    "labels",
    [
        torch.arange(12).view(3, 4).t(),  # strided
        torch.arange(24).view(2, 3, 4),  # more dimensions
        torch.arange(4).view(1, 4).expand(3, 4),  # memory used several times
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.empty(0, 4, dtype=torch.long),
    ],
    ids=["strided", "three dimensions", "expanded", "int32", "empty"],
)
def test_trimming_works_on_any_layout_of_labels(labels):
    batch = [None, labels]
    trim_labels_(batch, 5, shifted=False)
    expected = [value if place < 5 else IGNORE_INDEX for place, value in enumerate(labels.flatten().tolist())]
    assert batch[1].flatten().tolist() == expected
    assert batch[1].dtype == labels.dtype


def test_labels_that_cannot_hold_the_ignored_value_stay_hidden_from_the_loss():
    """Bytes are allowed as labels by torch's loss; -100 would come out as token 156."""
    batch = [INPUTS, torch.ones(2, 3, dtype=torch.uint8)]
    trim_labels_(batch, 2, shifted=False)
    logits = torch.zeros(6, 256)
    kept = nn.functional.cross_entropy(logits, batch[1].flatten(), reduction="sum") / torch.log(torch.tensor(256.0))
    assert round(kept.item()) == 2


def test_gradients_of_a_trimmed_batch_come_from_the_kept_tokens_alone():
    logits = torch.randn(2, 4, 7, requires_grad=True)
    labels = torch.randint(7, (2, 4))
    batch = [None, labels]
    trim_labels_(batch, 5, shifted=False)
    nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()
    reached = logits.grad.abs().sum(-1).flatten() > 0
    assert reached.tolist() == [True] * 5 + [False] * 3
    alone = logits.detach().flatten(0, 1)[:5].requires_grad_()
    nn.functional.cross_entropy(alone, labels.flatten()[:5]).backward()
    torch.testing.assert_close(logits.grad.flatten(0, 1)[:5], alone.grad)
