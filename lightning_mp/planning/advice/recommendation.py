"""A recommendation as frozen values: the choices with their reasons, and the resulting Trainer."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_mp.ground.flops.device_traits import DeviceTraits

Sure = Literal["certain", "likely", "measure it"]
"""How sure a choice is: it follows from a documented fact; it is good practice with published figures; or it depends on
the model, and only a run on the machine itself can tell."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision."""

    what: str  #: is chosen, such as "precision" or "strategy".
    value: str  #: what was taken.
    reason: str  #: why, in a sentence or two.
    source: str  #: where the reason is documented or published; "calculated" for a calculation of this package.
    sure: Sure  #: "certain", "likely" or "measure it".


@dataclass(frozen=True, slots=True)
class Component:
    """A class of :mod:`lightning_mp` with keyword arguments, as Python or YAML.

    Example:
        >>> Component("AutocastPrecision", (("precision", "bf16-mixed"),)).python()
        'AutocastPrecision(precision="bf16-mixed")'
    """

    name: str
    arguments: tuple[tuple[str, "str | int | bool | Component"], ...] = ()

    def python(self) -> str:
        """A call."""
        return f"{self.name}({', '.join(f'{name}={_python(value)}' for name, value in self.arguments)})"

    def names(self) -> Iterator[str]:
        """Of this class and of those among its arguments."""
        yield self.name
        for _, value in self.arguments:
            if isinstance(value, Component):
                yield from value.names()

    def yaml(self) -> list[str]:
        """Lines of ``class_path`` and ``init_args``."""
        lines = [f"class_path: lightning_mp.{self.name}"]
        if self.arguments:
            lines.append("init_args:")
        for name, value in self.arguments:
            lines += _indent(_yaml(name, value))
        return lines


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to use, why, and the code."""

    device: DeviceTraits  #: that it is for.
    gpus: int  #: how many devices.
    goal: str  #: as it was given.
    choices: tuple[Choice, ...]  #: every choice, with its reason, source and how sure it is.
    #: keyword arguments of the Trainer, plugins and callbacks left out.
    trainer: tuple[tuple[str, "str | int | bool | Component"], ...]
    plugins: tuple[Component, ...] = ()  #: for ``Trainer(plugins=[...])``.
    callbacks: tuple[Component, ...] = ()  #: for ``Trainer(callbacks=[...])``.
    #: whether the device's memory suffices with one sequence in a micro-batch; None where that was not calculated or
    #: only the allocator decides.
    fits: bool | None = None

    def choice(self, what: str) -> Choice:
        """The choice about something, such as "precision".

        Raises:
            KeyError: nothing was chosen about it.
        """
        for row in self.choices:
            if row.what == what:
                return row
        raise KeyError(f"nothing was chosen about {what!r}, only about {', '.join(row.what for row in self.choices)}")

    def python(self) -> str:
        """Python code that creates the Trainer, with each choice as a comment above it."""
        components = [*self.plugins, *self.callbacks, *(v for _, v in self.trainer if isinstance(v, Component))]
        ours = sorted({name for component in components for name in component.names()})
        lines = ["import lightning.pytorch as pl"]
        if ours:
            lines += ["", f"from lightning_mp import {', '.join(ours)}"]
        lines += ["", *(f"# {row.what}: {row.value} ({row.sure})" for row in self.choices), "trainer = pl.Trainer("]
        lines += [f"    {name}={_python(value)}," for name, value in self.trainer]
        for name, parts in (("plugins", self.plugins), ("callbacks", self.callbacks)):
            if parts:
                lines += [f"    {name}=[", *(f"        {part.python()}," for part in parts), "    ],"]
        return "\n".join([*lines, ")"]) + "\n"

    def yaml(self) -> str:
        """The same Trainer as YAML for LightningCLI, with each choice as a comment above it."""
        lines = [*(f"# {row.what}: {row.value} ({row.sure})" for row in self.choices), "trainer:"]
        for name, value in self.trainer:
            lines += _indent(_yaml(name, value))
        for name, parts in (("plugins", self.plugins), ("callbacks", self.callbacks)):
            if parts:
                lines.append(f"  {name}:")
            for part in parts:
                first, *rest = part.yaml()
                lines += [f"    - {first}", *_indent(rest, 6)]
        return "\n".join(lines) + "\n"


def _python(value: "str | int | bool | Component") -> str:
    if isinstance(value, Component):
        return value.python()
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _yaml(name: str, value: "str | int | bool | Component") -> list[str]:
    if isinstance(value, Component):
        return [f"{name}:", *_indent(value.yaml())]
    return [f"{name}: {json.dumps(value)}"]  # JSON is YAML


def _indent(lines: list[str], by: int = 2) -> list[str]:
    return [f"{' ' * by}{line}" for line in lines]
