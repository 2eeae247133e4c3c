"""State from a checkpoint is checked like arguments, before anything is changed by it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Schema:
    """What an entry must be: in words, and as a test."""

    description: str
    accepts: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


COUNT = Schema("a whole number from 0", _is_count)
POSITIVE = Schema("a positive number", lambda value: _is_number(value) and value > 0)
POSITIVE_COUNT = Schema("a whole number from 1", lambda value: _is_count(value) and value > 0)
ANY_NUMBER = Schema("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
NUMBER = Schema("a finite number", _is_number)
AMOUNT = Schema("a finite number from 0", lambda value: _is_number(value) and value >= 0)
FLAG = Schema("True or False", lambda value: isinstance(value, bool))
MAPPING = Schema("a mapping", lambda value: isinstance(value, Mapping))
TEXT = Schema("text", lambda value: isinstance(value, str))


def or_none(schema: Schema) -> Schema:
    """The same, or None."""
    return Schema(f"{schema.description} or None", lambda value: value is None or schema.accepts(value))


def listed_of(schema: Schema, length: int | None = None) -> Schema:
    """A list of such; of that length if one is given."""
    number = "" if length is None else f"{length} times "
    return Schema(
        f"a list of {number}{schema.description}",
        lambda value: isinstance(value, list) and length in (None, len(value)) and all(map(schema.accepts, value)),
    )


def holding(schemas: Mapping[str, Schema]) -> Schema:
    """A mapping that has exactly these entries."""
    words = ", ".join(f"{name} ({schema.description})" for name, schema in schemas.items())
    return Schema(
        f"a mapping of {words}",
        lambda value: (
            isinstance(value, Mapping)
            and value.keys() == schemas.keys()
            and all(schema.accepts(value[name]) for name, schema in schemas.items())
        ),
    )


def named(schema: Schema) -> Schema:
    """A mapping from names to such."""
    return Schema(
        f"a mapping from names to {schema.description}",
        lambda value: (
            isinstance(value, Mapping)
            and all(isinstance(name, str) and schema.accepts(entry) for name, entry in value.items())
        ),
    )


def checked_state(state: Any, schemas: Mapping[str, Schema], whose: str) -> dict[str, Any]:
    """The state, if it holds these entries and each is what it must be.

    >>> checked_state({"tokens": 3}, {"tokens": COUNT}, "the counter")
    {'tokens': 3}
    >>> checked_state({"tokens": -3}, {"tokens": COUNT}, "the counter")
    Traceback (most recent call last):
    ValueError: The checkpoint's state of the counter cannot be loaded: 'tokens' is -3; it must be a whole number
    from 0. Nothing was changed. Resume from another checkpoint.
    """
    wrong = ""
    if not isinstance(state, Mapping):
        wrong = f"it is of type {type(state).__name__}; it must be a mapping"
    elif missing := [name for name in schemas if name not in state]:
        wrong = f"it has no {', '.join(map(repr, missing))}"
    else:
        for name, schema in schemas.items():
            if not schema.accepts(state[name]):
                wrong = f"{name!r} is {_shown(state[name])}; it must be {schema.description}"
                break
    if wrong:
        raise ValueError(
            f"The checkpoint's state of {whose} cannot be loaded: {wrong}. Nothing was changed. Resume from another"
            " checkpoint."
        )
    return dict(state)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def tensor_like(shape: torch.Size) -> Schema:
    """A floating-point tensor of that shape."""
    return Schema(
        f"a floating-point tensor of shape {list(shape)}",
        lambda value: isinstance(value, Tensor) and value.shape == shape and value.is_floating_point(),
    )
