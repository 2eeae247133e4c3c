"""Splitting batches and joining outputs, apart from any training."""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from lightning_mp.training.accumulation.batch_split import num_samples, split_batch, split_by
from lightning_mp.training.accumulation.part_results import merge_outputs

Pair = namedtuple("Pair", ["x", "names"])


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    names: list[str]
    scale: float = 2.0
    doubled: Tensor = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.x)


def rows(value: Any) -> list[Any]:
    return [microbatch.batch for microbatch in split_batch(value, 2)]


X = torch.arange(10.0).reshape(5, 2)
NAMES = list("abcde")


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 2))
def test_microbatches_cover_the_batch_and_are_few_and_even(samples, size, least):
    microbatches = split_batch(torch.arange(samples), size, least)
    lengths = [microbatch.samples for microbatch in microbatches]
    assert torch.equal(torch.cat([microbatch.batch for microbatch in microbatches]), torch.arange(samples))
    assert lengths == [len(microbatch.batch) for microbatch in microbatches]
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= min(least, samples)
    if least <= min(size, samples) and (least == 1 or samples % size == 0):
        assert max(lengths) <= size
        assert len(lengths) == -(-samples // size)


def test_tensor_is_viewed_and_not_copied():
    microbatches = split_batch(X, 2)
    assert [microbatch.samples for microbatch in microbatches] == [2, 2, 1]
    assert torch.equal(torch.cat([microbatch.batch for microbatch in microbatches]), X)
    assert microbatches[1].batch.data_ptr() == X[2:].data_ptr()


def test_a_batch_that_fits_is_the_same_object():
    (microbatch,) = split_batch(X, 5)
    assert microbatch.batch is X
    assert microbatch.samples == 5


def test_nested_containers():
    batch = {"x": X, "pair": (X[:, 0], [X[:, 1]]), "names": NAMES, "epoch": 3, "lr": torch.tensor(0.1), "none": None}
    first, _, last = rows(batch)
    assert torch.equal(last["x"], X[4:])
    assert torch.equal(first["pair"][1][0], X[:2, 1])
    assert type(first["pair"]) is tuple
    assert (last["names"], last["epoch"], last["none"]) == (["e"], 3, None)
    assert last["lr"] is batch["lr"]
    assert batch["x"] is X


def test_named_tuple():
    assert type(rows(Pair(X, NAMES))[2]) is Pair
    assert rows(Pair(X, NAMES))[2].names == ["e"]


def test_frozen_dataclass_with_a_field_that_init_does_not_take():
    microbatches = rows(Sample(X, NAMES))
    assert [type(microbatch) for microbatch in microbatches] == [Sample] * 3
    assert torch.equal(microbatches[1].doubled, 2 * X[2:4])
    assert (microbatches[2].names, microbatches[2].scale) == (["e"], 2.0)
    assert rows([Sample(X, NAMES)])[2][0].names == ["e"]


def test_batch_encoding_stays_one():
    batch = BatchEncoding({"input_ids": X.long(), "attention_mask": torch.ones(5, 2)})
    microbatches = rows(batch)
    assert all(type(microbatch) is BatchEncoding for microbatch in microbatches)
    assert torch.equal(microbatches[2].input_ids, X[4:].long())
    assert len(batch["input_ids"]) == 5


def test_user_dict_and_arrays():
    microbatches = rows(UserDict(x=np.arange(5), y=X))
    assert type(microbatches[0]) is UserDict
    assert microbatches[1]["x"].tolist() == [2, 3]


def test_texts_alone_are_samples():
    assert rows(NAMES) == [["a", "b"], ["c", "d"], ["e"]]
    assert num_samples({"texts": NAMES}) == 5


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X, "mask": torch.ones(3)}, r"batch\['mask'\] has 3 rows, batch\['x'\] has 5"),
        ([X, ["a", "b"]], r"batch\[1\] has 2 rows, batch\[0\] has 5"),
        ({"x": X, "graph": SimpleNamespace()}, r"batch\['graph'\] is of type 'SimpleNamespace'"),
        ([X, {1, 2}], r"batch\[1\] is of type 'set'"),
        ([torch.tensor(1.0), 3], "a batch of type 'list' in which no tensor has a first dimension"),
        (pack_sequence([torch.ones(2), torch.ones(1)]), "batch is of type 'PackedSequence'"),
        ([X.to_sparse()], r"batch\[0\] is a nested or sparse tensor"),
        ({"x": X[:0]}, "no tensor has a first dimension"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(batch, message):
    with pytest.raises(MisconfigurationException, match=message + r".*Pass MicroBatchOnOOM\(split=\.\.\.\)"):
        split_batch(batch, 2)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            lambda batch, size: list(batch.split(size if size == 1 else 3)),
            r"microbatches of \[3, 2\] samples for",
        ),
        (lambda batch, size: list(batch.split(size))[: 5 // size], r"microbatches of \[2, 2\] samples for"),
        (lambda batch, size: [] if size == 2 else list(batch.split(size)), r"microbatches of \[\] samples for"),
    ],
    ids=["too large", "lost", "none"],
)
def test_a_users_split_that_is_wrong_is_refused(split, message):
    with pytest.raises(MisconfigurationException, match=message):
        split_by(split, X, 2)


def test_a_users_split():
    microbatches = split_by(lambda batch, size: list(batch.split(size)), X, 2)
    assert [microbatch.samples for microbatch in microbatches] == [2, 2, 1]


# -- outputs -----------------------------------------------------------------------------------------------------------


def merged(*outputs: Any) -> Any:
    """Of two microbatches, 3 samples and 1, with as many tokens."""
    return merge_outputs(outputs, [3, 1], [0.75, 0.25])


def test_numbers_are_averaged():
    assert merged(1.0, 3.0) == 1.5
    assert torch.equal(merged(torch.tensor(1.0), torch.tensor(3.0)), torch.tensor(1.5))
    assert torch.equal(merged(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0])), torch.tensor([1.5, 1.0]))


def test_rows_are_joined():
    assert torch.equal(merged(X[:3], X[3:4]), X[:4])
    assert merged(["a", "b", "c"], ["d"]) == ["a", "b", "c", "d"]
    assert merged({"y": (X[:3], 2.0)}, {"y": (X[3:4], 4.0)})["y"][1] == 4.0 - 1.5


def test_a_list_of_as_many_entries_as_samples_is_one_of_samples_unless_its_entries_have_their_rows():
    boxes = [torch.ones(number, 4) for number in (3, 5, 1, 2)]
    joined = merge_outputs([{"boxes": boxes[:2]}, {"boxes": boxes[2:]}], [2, 2], [1, 1])["boxes"]
    assert [len(box) for box in joined] == [3, 5, 1, 2]
    pair = merge_outputs([(X[:2], X[2:4]), (X[1:3], X[3:5])], [2, 2], [1, 1])
    assert [len(entry) for entry in pair] == [4, 4]


def test_dicts_stay_of_their_kind():
    ordered = merged(OrderedDict(y=X[:3], z=1.0), OrderedDict(y=X[3:4], z=3.0))
    assert type(ordered) is OrderedDict
    assert len(ordered["y"]) == 4


def test_of_anything_else_the_last_is_taken():
    assert merged(1, 2) == 2
    assert merged("a", "b") == "b"
    assert merged(None, None) is None
    assert merged(torch.tensor(1), torch.tensor(2)) == 2
    assert torch.equal(merged(torch.ones(2, 3), torch.ones(4, 3)), torch.ones(4, 3))
    assert merged([1, 2], [3]) == [3]
    assert merged({"a": 1.0, "b": 2.0}, {"a": 3.0}) == {"a": 1.5}
