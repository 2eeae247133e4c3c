"""The end of a token budget: whole runs of random micro-batches, on one rank and on many."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lightning_mp.training.tokens.budget import LastBatch, TokenBudget, split_last_batch


def micro_batches(num_ranks, *, at_least=1):
    """Lists of micro-batches; each holds the target tokens of every rank."""
    counts = st.integers(at_least, 40)
    return st.lists(st.tuples(*[counts] * num_ranks), min_size=1, max_size=30)


def run(batches, budget, mode):
    """Trains on micro-batches until the run ends; returns what each rank kept of each and whether it ended itself."""
    largest = max(sum(counts) for counts in batches)
    spent, kept = 0, []
    for counts in batches:
        landing = split_last_batch(counts, budget - spent, mode, largest)
        assert len(landing.keep_tokens) == len(counts)
        assert all(keep <= count for keep, count in zip(landing.keep_tokens, counts, strict=True))
        kept.append(landing.keep_tokens)
        spent += sum(landing.keep_tokens)
        if landing.is_last:
            return spent, kept, True
    return spent, kept, False


ranks = pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])


# -- exact -------------------------------------------------------------------------------------------------------------


@ranks
@given(data=st.data())
def test_exact_ends_on_the_budget_to_the_token_and_every_rank_always_keeps_one(num_ranks, data):
    """Micro-batches of two tokens or more per rank, which the budget asks for."""
    batches = data.draw(micro_batches(num_ranks, at_least=2))
    total = sum(map(sum, batches))
    budget = data.draw(st.integers(num_ranks, total))
    spent, kept, ended = run(batches, budget, "exact")
    assert spent <= budget
    assert all(keep >= 1 for keeps in kept for keep in keeps)
    if ended:
        assert spent == budget
    else:
        # Only a shortened last-but-one micro-batch can use up all batches without an end.
        assert budget - spent == num_ranks
        assert kept[-1] != batches[-1]


@ranks
@given(data=st.data())
def test_exact_lands_whenever_one_more_micro_batch_follows(num_ranks, data):
    batches = data.draw(micro_batches(num_ranks, at_least=2))
    budget = data.draw(st.integers(num_ranks, sum(map(sum, batches))))
    spent, _, ended = run([*batches, batches[0]], budget, "exact")
    assert (spent, ended) == (budget, True)


@ranks
@given(data=st.data())
def test_exact_changes_nothing_before_the_last_but_one_micro_batch(num_ranks, data):
    batches = data.draw(micro_batches(num_ranks, at_least=2))
    budget = data.draw(st.integers(num_ranks, sum(map(sum, batches))))
    _, kept, _ = run([*batches, batches[0]], budget, "exact")
    changed = [index for index, (keeps, counts) in enumerate(zip(kept, batches, strict=False)) if keeps != counts]
    assert all(index >= len(kept) - 2 for index in changed)


@pytest.mark.parametrize("remaining", range(3, 60))
@pytest.mark.parametrize("counts", [(9, 9, 9), (2, 2, 2), (20, 1, 1), (1, 1, 20), (5, 17, 4)])
def test_exact_in_all_small_cases(counts, remaining):
    """Exhaustive around the end, on three ranks: what is left is never too little for the next micro-batch."""
    landing = split_last_batch(counts, remaining, "exact", sum(counts))
    kept = sum(landing.keep_tokens)
    assert all(1 <= keep <= count for keep, count in zip(landing.keep_tokens, counts, strict=True))
    if landing.is_last:
        assert kept == remaining
    else:
        assert remaining - kept >= len(counts)
    if remaining >= sum(counts) + len(counts):
        assert landing == LastBatch(counts, is_last=False)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.data())
def test_on_one_rank_exact_keeps_everything_up_to_the_budget(counts, data):
    budget = data.draw(st.integers(1, sum(counts)))
    spent, kept, ended = run([(count,) for count in counts], budget, "exact")
    assert (spent, ended) == (budget, True)
    assert [keep for (keep,) in kept[:-1]] == counts[: len(kept) - 1]


@ranks
@given(data=st.data())
@example(data=None)
def test_with_very_short_micro_batches_exact_is_off_by_less_than_one_token_per_rank(num_ranks, data):
    """One token on a rank cannot be divided, and a rank may have none: no rank loses its last token for the budget."""
    if data is None:
        batches, budget = [(1,) * num_ranks] * 3, num_ranks + 1
    else:
        batches = data.draw(micro_batches(num_ranks, at_least=0))
        budget = data.draw(st.integers(1, max(1, sum(map(sum, batches)))))
    spent, kept, ended = run(batches, budget, "exact")
    assert spent < budget + num_ranks
    for keeps, counts in zip(kept, batches, strict=False):
        assert all(keep >= min(count, 1) for keep, count in zip(keeps, counts, strict=True))
    if ended:
        assert spent >= budget


# -- floor and ceil ----------------------------------------------------------------------------------------------------


@ranks
@given(data=st.data())
def test_floor_never_passes_the_budget_and_trims_nothing(num_ranks, data):
    batches = data.draw(micro_batches(num_ranks))
    budget = data.draw(st.integers(sum(batches[0]), 1200))
    spent, kept, ended = run(batches, budget, "floor")
    assert spent <= budget
    assert kept == batches[: len(kept)]
    if ended:  # not a micro-batch too early: the largest one would not have fitted any more
        assert budget - spent < max(map(sum, batches))
    else:
        assert len(kept) == len(batches)


@ranks
@given(data=st.data())
def test_ceil_ends_with_the_micro_batch_that_reaches_the_budget_and_trims_nothing(num_ranks, data):
    batches = data.draw(micro_batches(num_ranks))
    budget = data.draw(st.integers(1, 1200))
    spent, kept, ended = run(batches, budget, "ceil")
    assert kept == batches[: len(kept)]
    assert ended == (sum(map(sum, batches)) >= budget)
    if ended:
        assert spent >= budget > spent - sum(kept[-1])


@given(st.integers(1, 50), st.integers(1, 2000))
@example(10, 100)
@example(10, 101)
def test_with_equal_micro_batches_floor_and_ceil_are_those_of_a_division(tokens, budget):
    assume(tokens <= budget)
    batches = [(tokens,)] * (budget // tokens + 2)
    assert run(batches, budget, "floor")[0] == budget // tokens * tokens
    assert run(batches, budget, "ceil")[0] == -(-budget // tokens) * tokens
    assert run(batches, budget, "exact")[0] == budget


@pytest.mark.parametrize("mode", ["exact", "floor", "ceil"])
def test_a_budget_that_full_micro_batches_reach_is_spent_without_trimming(mode):
    assert run([(8, 8)] * 5, 64, mode) == (64, [(8, 8)] * 4, True)


def test_floor_does_not_end_before_a_micro_batch_size_is_known():
    assert split_last_batch([4], remaining=10, mode="floor", largest_micro_batch=0) == LastBatch((4,), is_last=False)
    assert split_last_batch([4], remaining=4, mode="floor", largest_micro_batch=0) == LastBatch((4,), is_last=True)


# -- the budget --------------------------------------------------------------------------------------------------------


def test_an_unknown_landing_is_refused_and_every_one_that_is_offered_works():
    message = r"^landing='round' is unknown; it must be one of \('exact', 'floor', 'ceil', 'nearest'\)\.$"
    with pytest.raises(ValueError, match=message):
        TokenBudget(10, "round")
    for landing in ("exact", "floor", "ceil"):
        assert TokenBudget(10, landing).landing == landing
        assert split_last_batch([10], 10, landing, 10) == LastBatch((10,), is_last=True)
    assert TokenBudget(10).landing == "exact"
