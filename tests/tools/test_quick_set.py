"""`make test` runs each value of a parameter, `make test-full` each pair of values of two."""

import itertools
from pathlib import Path

import pytest
from longest_files import LONGEST_FILES
from quick_set import covering_cases, slow_cases

STRATEGIES, PRECISIONS, SIZES = ["ddp", "fsdp"], ["fp16", "bf16", "fp32"], [1, 2, 4, 8]


@pytest.mark.parametrize("axes", [[SIZES], [STRATEGIES, PRECISIONS], [STRATEGIES, PRECISIONS, SIZES]], ids=len)
def test_as_many_cases_as_the_longest_parameter_has_values(axes):
    grid = {case: set(enumerate(case)) for case in itertools.product(*axes)}
    cases = covering_cases(grid)
    assert len(cases) == max(len(axis) for axis in axes)
    assert [{*column} for column in zip(*cases, strict=True)] == [{*axis} for axis in axes]


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_what_one_parametrize_gives_together_is_never_left_out(request, first, second):
    assert request.node.get_closest_marker("full") is None


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("x", [1, 2, 3])
@pytest.mark.parametrize("y", [1, 2, 3])
def test_a_marked_test_says_how_many_cases_are_enough(request, x, y):
    cases = [item for item in request.session.items if item.nodeid.split("[")[0] == request.node.nodeid.split("[")[0]]
    if len(cases) == 9:  # the full set
        assert len(slow_cases(cases)) == 9 - 2
    assert x == y or request.node.get_closest_marker("full")


@pytest.mark.full
@pytest.mark.parametrize("x", SIZES)
@pytest.mark.parametrize("y", PRECISIONS)
@pytest.mark.parametrize("z", STRATEGIES)
def test_each_pair_of_values_has_a_case(request, x, y, z):
    cases = [item for item in request.session.items if item.nodeid.split("[")[0] == request.node.nodeid.split("[")[0]]
    if len(cases) > 1:  # not this one alone
        values = [tuple(case.callspec.params[name] for name in "xyz") for case in cases]
        assert {value[:2] for value in values} == set(itertools.product(SIZES, PRECISIONS))
        assert {value[1:] for value in values} == set(itertools.product(PRECISIONS, STRATEGIES))
        assert len(cases) == 24 if request.config.option.every_case else len(cases) <= 14


def test_the_files_that_are_begun_first_are_there():
    there = {path.stem for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert set(LONGEST_FILES) <= there
    assert len(set(LONGEST_FILES)) == len(LONGEST_FILES)
