"""Batches of text: every block once per pass, no overlap between ranks, resumable at any point."""

import pytest
import torch

from lightning_mp.language_model import HeldOutBatches, TextBatches

TEXT = (torch.arange(1000) % 251).to(torch.uint8)


def _batches(**changes):
    arguments = {"batch_size": 3, "block_tokens": 7, "seed": 5} | changes
    return TextBatches(TEXT, **arguments)


def _rows(batches):
    return [tuple(row.tolist()) for inputs, _ in batches for row in inputs]


def test_a_batch_is_a_list_of_int64_inputs_and_the_tokens_that_follow_them():
    inputs, labels = next(iter(_batches()))
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.shape == labels.shape == (3, 7)
    assert torch.equal((inputs + 1) % 251, labels), "in this text every byte is followed by the next number"
    assert isinstance(next(iter(_batches())), list)


def test_one_pass_shows_every_block_at_most_once_and_all_but_an_incomplete_batch():
    batches = _batches()
    rows = _rows(batches)
    blocks = {tuple(TEXT[start : start + 7].tolist()) for start in range(0, 999 - 6, 7)}
    assert len(rows) == len(set(rows)) == 3 * len(batches)
    assert set(rows) <= blocks
    assert len(blocks) - len(rows) < 3


def test_passes_differ_and_are_the_same_for_the_same_seed():
    batches = _batches()
    first, second = _rows(batches), _rows(batches)
    assert first != second
    again = _batches()
    assert (_rows(again), _rows(again)) == (first, second)
    assert _rows(_batches(seed=6)) != first


def test_ranks_share_the_single_rank_order_without_overlap():
    alone = list(_batches(batch_size=6))
    ranks = [list(_batches(rank=rank, world_size=2)) for rank in range(2)]
    assert len(alone) == len(ranks[0]) == len(ranks[1])
    for whole, left, right in zip(alone, *ranks, strict=True):
        assert torch.equal(whole[0], torch.cat([left[0], right[0]]))
        assert torch.equal(whole[1], torch.cat([left[1], right[1]]))


@pytest.mark.parametrize("stop_after", [0, 1, 46, 47, 48, 100, 119])
def test_stopping_and_resuming_anywhere_equals_no_stop(stop_after):
    """120 batches are two and a half passes of 47."""
    whole = _rows(_batches(num_batches=120))
    stopped = _batches(num_batches=120)
    iterator = iter(stopped)
    before = _rows(next(iterator) for _ in range(stop_after))
    state = stopped.state_dict()
    resumed = _batches(num_batches=120)
    resumed.load_state_dict(state)
    assert before + _rows(resumed) == whole


def test_an_iteration_after_the_last_goes_on_where_it_ended():
    two_halves = _batches(num_batches=60)
    assert _rows(two_halves) + _rows(two_halves) == _rows(_batches(num_batches=120))


def test_the_length_is_that_of_a_whole_iteration_also_after_a_resume():
    batches = _batches(num_batches=120)
    next(iter(batches))
    assert len(batches) == 120


def test_resuming_with_another_global_batch_size_is_refused():
    state = _batches().state_dict()
    with pytest.raises(ValueError, match=r"batches of 3 sequences over all ranks, and this run has 6: resume with"):
        _batches(world_size=2).load_state_dict(state)


def test_held_out_batches_are_the_same_every_time_and_spread_over_the_text():
    batches = HeldOutBatches(TEXT, batch_size=3, block_tokens=7, max_batches=4)
    rows = _rows(batches)
    assert rows == _rows(batches)
    assert len(rows) == len(set(rows)) == 12
    assert rows[0][0] == TEXT[0]
    assert rows[-1][0] == TEXT[141 * 7]


def test_held_out_ranks_do_not_overlap_and_have_equal_sizes():
    rows = [
        _rows(HeldOutBatches(TEXT, batch_size=3, block_tokens=7, max_batches=4, rank=rank, world_size=2))
        for rank in range(2)
    ]
    assert len(rows[0]) == len(rows[1]) == 12
    assert not set(rows[0]) & set(rows[1])


def test_a_held_out_text_with_fewer_blocks_than_a_batch_is_used_whole():
    batches = HeldOutBatches(TEXT[:36], batch_size=16, block_tokens=7, max_batches=4)
    assert [inputs.shape for inputs, _ in batches] == [(5, 7)]
