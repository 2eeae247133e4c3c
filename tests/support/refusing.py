"""What the tests of refusals share: tables of wrong arguments, and fits that must or must not begin."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import fit, loader, quiet_trainer, token_batches, weights

Batches = list[Any]


class Each(tuple[Any, ...]):
    """In a row of a table: several wrong values with the same words, each a case of its own."""

    __slots__ = ()


@dataclass(frozen=True)
class Refusal:
    """A call that must fail, and words of its message (a regular expression)."""

    part: Callable[..., Any]
    arguments: Any
    words: str
    error: type[Exception] = ValueError

    def check(self) -> None:
        given = self.arguments
        call = (
            partial(self.part, **given)
            if isinstance(given, dict)
            else partial(self.part, *(given if isinstance(given, tuple) else (given,)))
        )
        with pytest.raises(self.error, match=self.words):
            call()

    def __str__(self) -> str:
        """The name of a case. It holds no address, since all workers must find the same names."""
        part = self.part.func if isinstance(self.part, partial) else self.part
        return f"{part.__qualname__}({_said(self.arguments)})"


def refusals(table: Mapping[Callable[..., Any], Sequence[tuple[Any, ...]]]) -> pytest.MarkDecorator:
    """Parametrizes a test with a ``refusal`` for each row of the table: part -> [(arguments, words, [error]), ...].

    Arguments are keywords as a dict, positions as a tuple, or the only one itself; :class:`Each` stands for several.
    """
    cases = [
        Refusal(part, arguments, *row[1:])
        for part, rows in table.items()
        for row in rows
        for arguments in _expanded(row[0])
    ]
    return pytest.mark.parametrize("refusal", cases, ids=str)


def _expanded(arguments: Any) -> Iterator[Any]:
    if isinstance(arguments, Each):
        yield from arguments
    elif isinstance(arguments, dict):
        values = [value if isinstance(value, Each) else (value,) for value in arguments.values()]
        yield from (dict(zip(arguments, chosen, strict=True)) for chosen in itertools.product(*values))
    else:
        yield arguments


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_said(inner)}" for name, inner in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(_said, value))
    text = repr(value)
    return text if len(text) < 40 and " at 0x" not in text else type(value).__name__


def tokens() -> Batches:
    """Six batches of seven tokens."""
    return token_batches([7] * 6)


def refused(message: str, module: pl.LightningModule, batches: Batches, **arguments: Any) -> None:
    """Asserts that a fit ends in this very line, before anything happened."""
    before = weights(module)
    trainer = quiet_trainer(enable_checkpointing=True, **arguments)
    micro_batches = trainer.accumulate_grad_batches
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        trainer.fit(module, loader(batches))
    assert all(torch.equal(old, new) for old, new in zip(before, weights(module), strict=True))
    assert trainer.accumulate_grad_batches == micro_batches
    assert "lr_scheduler_step" not in vars(module)
    assert not list(Path().iterdir())


def trains(module: pl.LightningModule, batches: Batches, **arguments: Any) -> pl.Trainer:
    """Asserts that a fit, changed as a message says, moves the weights."""
    before = weights(module)
    trainer = fit(module, batches, **arguments)
    assert not any(torch.equal(old, new) for old, new in zip(before, weights(module), strict=True))
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    return trainer
