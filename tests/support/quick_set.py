"""Which cases of a parametrized test are run: all pairs of values in the full set, all values in the quick one."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=Hashable)


def covering_cases(values: Mapping[Case, set[Any]]) -> list[Case]:
    """A few cases in which each value of any of them occurs; the first of equally good ones.

    Example:
        >>> grid = {(x, y): {("x", x), ("y", y)} for x in (1, 2, 3) for y in (1, 2)}
        >>> covering_cases(grid)
        [(1, 1), (2, 2), (3, 1)]
    """
    left = dict(values)
    missing = set().union(*values.values())
    found = []
    while missing:
        found.append(max(left, key=lambda case: len(left[case] & missing)))
        missing -= left.pop(found[-1])
    return found


def repeated_cases(cases: Sequence[pytest.Function]) -> set[pytest.Function]:
    """The cases of one test that no set runs: others already have each pair of their values.

    Only a test with three `parametrize` or more has any. `--every-case` runs them nevertheless.
    """
    values = {case: _values(case) for case in cases}
    if len(next(iter(values.values()))) < 3:
        return set()
    pairs = {case: set(itertools.combinations(sorted(of_case), 2)) for case, of_case in values.items()}
    return set(cases).difference(covering_cases(pairs))


def slow_cases(cases: Sequence[pytest.Function]) -> set[pytest.Function]:
    """The cases of one test that the quick set leaves out.

    With several `parametrize`, it runs as few cases as have every value of each of them. Where that takes too long, a
    test marked `quick_cases` says how many of these are enough.
    """
    quick = covering_cases({case: _values(case) for case in cases})
    marker = cases[0].get_closest_marker("quick_cases")
    return set(cases).difference(quick[: marker.args[0]] if marker else quick)


def _values(case: pytest.Function) -> set[tuple[Any, ...]]:
    """Each `parametrize` with its value in this case; what one of them gives together is one value."""
    parameters = case.callspec.params
    together = [_names(mark.args[0]) for mark in case.iter_markers("parametrize")]
    alone = [(name,) for name in parameters if not any(name in names for names in together)]
    return {(names, *(id(parameters[name]) for name in names)) for names in [*together, *alone]}


def _names(argument_names: str | Sequence[str]) -> tuple[str, ...]:
    text = argument_names if isinstance(argument_names, str) else ",".join(argument_names)
    return tuple(name.strip() for name in text.split(","))
