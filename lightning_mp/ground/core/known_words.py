"""Arguments that take one of a few words, such as the name of a precision: what is allowed, and what was meant."""

import re
from collections.abc import Iterable
from difflib import get_close_matches


def refuse_unknown(value: object, argument: str, owner: str, allowed: Iterable[str], *, hint: str = "") -> None:
    """Refuses a value that is none of the words, and names the one that was probably meant.

    >>> refuse_unknown("steps", "unit", "AccumulationScheduler", ("epoch", "step"))
    Traceback (most recent call last):
    ...
    ValueError: AccumulationScheduler(unit='steps') is unknown; it must be one of ('epoch', 'step'). Did you mean
    'step'?
    """
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise ValueError(
            f"{owner}({argument}={value!r}) is unknown; it must be one of {words}.{did_you_mean(value, words)}{hint}"
        )


def did_you_mean(value: object, words: Iterable[str]) -> str:
    """The word that resembles a value, as the end of a message; of a precision also the one of its format.

    >>> precisions = ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "bf16-true+remainder")
    >>> [did_you_mean(value, precisions) for value in ("fp16", "bf16", "bf16-remainder", "torch.float16", 32)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [" Did you mean '16-mixed'?", " Did you mean 'bf16-mixed'?", " Did you mean 'bf16-true+remainder'?",
     " Did you mean '16-mixed'?", " Did you mean '32-true'?"]
    >>> did_you_mean("int4", precisions)
    ''
    """
    words = tuple(words)
    wanted = re.sub(r"^torch\.|(?<!b)fp(?!8)|(?<!b)float(?!8)", "", str(value).lower())
    for spelling, ours in (("bfloat", "bf"), ("float8", "fp8"), ("half", "16"), ("masters", "true"), ("amp", "mixed")):
        wanted = wanted.replace(spelling, ours)
    begun = [word for word in words if wanted and word.startswith(wanted)]
    found = begun or get_close_matches(wanted, words, 1, cutoff=0.7)
    return f" Did you mean {found[0]!r}?" if found else ""
