"""The account of tokens: exact integers, one window late, the same on the host as on the device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.training.tokens.counter import NUM_TOTALS, AccumulationTotals, TokenCounter
from lightning_mp.training.tokens.run_counts import TokenCounterDeltas

CPU = torch.device("cpu")


class CountReads(TorchDispatchMode):
    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def closed(counter, items, tokens, input_tokens, micro_batches=1, largest=None, samples=0, nonpad=0):
    largest = -(-input_tokens // max(micro_batches, 1)) if largest is None else largest
    totals = torch.tensor([items, tokens, input_tokens, samples, nonpad, largest], dtype=torch.float64)
    counter.close_window(totals, micro_batches)


def sums(counter):
    return counter.tokens, counter.input_tokens, counter.windows


# -- one window --------------------------------------------------------------------------------------------------------


def test_an_empty_window_holds_nothing():
    totals = AccumulationTotals()
    assert totals.micro_batches == 0
    assert (totals.host[0], totals.device[0]) == (0.0, None)
    assert totals.tensor(CPU).tolist() == [0.0] * NUM_TOTALS


measures = st.lists(
    st.tuples(
        st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 99), st.integers(0, 9)
    ),
    max_size=20,
)


@given(measures, st.lists(st.booleans(), min_size=60, max_size=60), st.sampled_from([torch.int32, torch.int64]))
def test_totals_are_the_sums_whether_counted_on_the_host_or_on_the_device(numbers, on_device, dtype):
    """Each number comes as an int or as a tensor, in any mixture."""
    totals, choices = AccumulationTotals(), iter(on_device)
    all_items_on_host = True
    for items, tokens, input_tokens, samples, nonpad_tokens in numbers:
        items_on_device, tokens_on_device = next(choices), next(choices)
        all_items_on_host &= not items_on_device
        totals = totals.plus(
            torch.tensor(items, dtype=dtype) if items_on_device else items,
            torch.tensor(tokens, dtype=dtype) if tokens_on_device else tokens,
            input_tokens,
            samples,
            nonpad_tokens,
        )
    expected = [float(sum(column)) for column in zip(*numbers, strict=True)] or [0.0] * 5
    expected += [float(max((input_tokens for _, _, input_tokens, *_ in numbers), default=0)), float(len(numbers)), 0.0]
    assert totals.tensor(CPU).tolist() == expected
    assert totals.tokens(CPU).item() == expected[1]
    assert totals.micro_batches == len(numbers)
    assert (totals.device[0] is None) == all_items_on_host


def test_totals_are_one_vector_in_double_precision():
    totals = AccumulationTotals()
    totals = totals.plus(1, torch.tensor(3), 4)
    vector = totals.tensor(CPU)
    assert (vector.shape, vector.dtype, totals.tokens(CPU).shape) == ((NUM_TOTALS,), torch.float64, ())


def test_more_tokens_than_single_precision_counts_are_exact():
    totals = AccumulationTotals()
    totals = totals.plus(torch.tensor(2**24), 2**24, 2**40, 7)
    totals = totals.plus(torch.tensor(1), 1, 1, 8)
    assert totals.tensor(CPU).tolist() == [2**24 + 1, 2**24 + 1, 2**40 + 1, 15, 0, 2**40, 2, 0]


def test_a_counted_tensor_is_not_written_to():
    counted = torch.tensor(5)
    totals = AccumulationTotals()
    totals = totals.plus(counted, counted, 5)
    totals = totals.plus(counted, 1, 5)
    totals.tensor(CPU).add_(1)
    assert counted.item() == 5
    assert totals.tensor(CPU).tolist() == [10.0, 6.0, 10.0, 0.0, 0.0, 5.0, 2.0, 0.0]


# -- many windows ------------------------------------------------------------------------------------------------------


def test_on_a_cpu_a_window_is_read_when_it_closes():
    counter = TokenCounter()
    closed(counter, 10, 10, 12, micro_batches=3)
    assert (sums(counter), counter.unread_micro_batches) == ((10, 12, 1), 0)
    counter.skip_last_window()
    assert (counter.skipped_tokens, counter.tokens_before_last_window) == (10, 0)


def test_on_another_device_a_window_is_read_when_the_next_one_closes(monkeypatch):
    never = property(lambda copy: False, lambda copy, value: None)
    monkeypatch.setattr(HostCopy, "is_there", never, raising=False)
    counter = TokenCounter()
    closed(counter, 10, 10, 12, micro_batches=3)
    assert (sums(counter), counter.unread_micro_batches) == ((0, 0, 0), 3)
    closed(counter, 5, 5, 6, micro_batches=2)
    assert (sums(counter), counter.unread_micro_batches) == ((10, 12, 1), 2)
    counter.flush_pending()
    assert (sums(counter), counter.unread_micro_batches) == ((15, 18, 2), 0)
    counter.flush_pending()
    assert sums(counter) == (15, 18, 2)


def test_what_schedules_see_does_not_depend_on_when_the_account_is_looked_at():
    """A checkpoint settles the account; the run that goes on must not change its windows for that."""
    looked_at, left_alone = TokenCounter(), TokenCounter()
    for tokens, samples in [(10, 2), (20, 3), (5, 1), (7, 4)]:
        for counter in (looked_at, left_alone):
            closed(counter, 1, tokens, tokens, samples=samples)
        resumed = TokenCounter()
        resumed.load_state_dict(looked_at.state_dict())
        seen = {
            (counter.tokens_before_last_window, counter.samples_before_last_window) for counter in (looked_at, resumed)
        }
        assert seen == {(left_alone.tokens_before_last_window, left_alone.samples_before_last_window)}
    assert seen == {(35, 6)}


@pytest.mark.parametrize("settled_first", [False, True])
def test_skipped_and_repeated_tokens_are_booked_beside_the_others(settled_first):
    """With an unfused optimizer the skip is told before the window is read, at the end of a run after it."""
    counter = TokenCounter()
    for tokens, skipped, epoch in [(10, False, 0), (20, True, 0), (30, False, 1), (40, True, 1)]:
        counter.close_window(torch.tensor([1.0, tokens, tokens, 0, tokens, tokens]), 1, repeated=epoch > 0)
        if settled_first:
            counter.flush_pending()
        if skipped:
            counter.skip_last_window()
    counter.flush_pending()
    assert (counter.tokens, counter.skipped_tokens, counter.repeated_tokens) == (100, 60, 70)


def test_totals_are_copied_when_a_window_closes():
    counter = TokenCounter()
    totals = torch.tensor([4.0] * NUM_TOTALS, dtype=torch.float64)
    counter.close_window(totals, 1)
    totals.zero_()
    counter.flush_pending()
    assert counter.tokens == 4


windows = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 8), st.booleans()), max_size=30
)


@given(windows)
def test_the_account_is_exact_whenever_it_is_looked_at(numbers):
    counter, tokens, input_tokens = TokenCounter(), 0, 0
    for window_tokens, padding, micro_batches, look in numbers:
        closed(counter, window_tokens, window_tokens, window_tokens + padding, micro_batches)
        tokens += window_tokens
        input_tokens += window_tokens + padding
        if look:
            counter.flush_pending()
            assert (counter.tokens, counter.input_tokens) == (tokens, input_tokens)
            assert isinstance(counter.tokens, int)
    counter.flush_pending()
    assert sums(counter) == (tokens, input_tokens, len(numbers))


def test_a_long_run_is_counted_to_the_token():
    """Far beyond what single precision counts."""
    counter = TokenCounter()
    closed(counter, 1, 2**52, 2**52)
    for _ in range(100):
        closed(counter, 1, 2**24 + 1, 2**24 + 3)
    counter.flush_pending()
    assert counter.tokens == 2**52 + 100 * (2**24 + 1)
    assert counter.input_tokens == 2**52 + 100 * (2**24 + 3)


def test_closing_windows_reads_no_scalar_on_the_host():
    counter, totals = TokenCounter(), torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, 3.0], dtype=torch.float64)
    with CountReads() as reads:
        for _ in range(3):
            window = AccumulationTotals().plus(torch.tensor(1), torch.tensor(2), 3)
            counter.close_window(window.tensor(CPU), 1)
        assert reads.reads == 0
        totals[0].item()
        assert reads.reads == 1


def test_the_largest_micro_batch_is_remembered():
    counter = TokenCounter()
    for input_tokens, micro_batches, largest in [(100, 1, 100), (64, 1, 100), (999, 9, 111), (10, 0, 111)]:
        closed(counter, 1, 1, input_tokens, micro_batches)
        counter.flush_pending()
        assert counter.largest_micro_batch == largest
    closed(counter, 1, 1, 404, micro_batches=2, largest=400)
    counter.flush_pending()
    assert counter.largest_micro_batch == 400, "the largest, not the window's mean"


# -- state -------------------------------------------------------------------------------------------------------------


@given(windows)
def test_the_account_survives_a_checkpoint_in_the_middle(numbers):
    """Nothing that is on its way is lost, and what a used counter had counted before is forgotten."""
    straight, before = TokenCounter(), TokenCounter()
    after = TokenCounter()
    closed(after, 77, 77, 77)
    closed(after, 77, 77, 77)
    middle = len(numbers) // 2
    for index, (tokens, padding, micro_batches, _) in enumerate(numbers):
        for counter in (straight, before if index < middle else after):
            closed(counter, tokens, tokens, tokens + padding, micro_batches)
        if index == middle - 1:
            after.load_state_dict(before.state_dict())
    if middle == 0:
        return
    assert after.state_dict() == straight.state_dict()
    assert after.unread_micro_batches == 0


#: What only one fit looks at.
NOT_SAVED = ("skipped_nonpad_tokens", "last_window_nonpad_tokens", "last_window_was_skipped")


def test_the_state_holds_plain_numbers_and_every_attribute():
    counter = TokenCounter()
    closed(counter, 5, 4, 6, micro_batches=2, samples=9, nonpad=5)
    state = counter.state_dict()
    assert state == {
        "tokens": 4,
        "input_tokens": 6,
        "nonpad_tokens": 5,
        "samples": 9,
        "skipped_tokens": 0,
        "repeated_tokens": 0,
        "windows": 1,
        "largest_micro_batch": 3,
        "last_window_tokens": 4,
        "last_window_samples": 9,
    }
    assert set(state) == {name.removeprefix("_") for name in vars(counter)} - {"unread", *NOT_SAVED}
    assert all(type(value) is int for value in state.values())


# -- the copy under it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64], ids=str)
def test_a_host_copy_holds_the_numbers_of_the_moment_it_was_made(dtype):
    values = torch.tensor([1, 2, 3], dtype=dtype)
    copy = HostCopy(values)
    values.zero_()
    assert copy.read() == [1.0, 2.0, 3.0]
    assert copy.read() == [1.0, 2.0, 3.0]
    assert all(type(number) is float for number in copy.read())


def test_a_host_copy_takes_tensors_that_need_a_gradient_and_strided_ones():
    assert HostCopy(torch.ones(2, requires_grad=True) * 3).read() == [3.0, 3.0]
    assert HostCopy(torch.arange(6.0)[::2]).read() == [0.0, 2.0, 4.0]


# -- what is new since the last look -----------------------------------------------------------------------------------


def test_tokens_of_a_skip_are_taken_off_whether_they_were_read_before_it_was_known_or_not():
    """A fused step is known to be skipped after its tokens were read; 12 of 16 were no padding, 10 had a label."""
    for is_late in (False, True):
        counter = TokenCounter()
        changes = TokenCounterDeltas(counter)
        closed(counter, 10, 10, 16, nonpad=12)
        useful = []
        if is_late:
            counter.flush_pending()
            useful.append(changes.take().useful_tokens)
        counter.skip_last_window()
        counter.flush_pending()
        assert changes.any
        useful.append(changes.take().useful_tokens)
        assert useful == ([12, -12] if is_late else [0])
        assert not changes.any
        closed(counter, 10, 10, 16, nonpad=12)
        counter.flush_pending()
        assert changes.take().useful_tokens == 12
