"""The rules of a precision policy: how they are written, and which modules of a model they match."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from typing_extensions import override

from lightning_mp.ground.core.bit_layouts import FORMATS
from lightning_mp.ground.core.number_formats import number_format
from lightning_mp.ground.modules.names import near_misses
from lightning_mp.training.policy.operations import FAMILIES, KNOWN_OPERATIONS, operations_named

LOW: Literal["low"] = "low"
"""The 16-bit dtype of the plugin that applies the policy."""

Dtype = torch.dtype | Literal["low"]
"""What a rule requests."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = ("fp32", "bf16", "fp16", LOW)
_Kind = Literal["module", "re", "class", "op"]


@dataclass(frozen=True)
class Rule:
    """One rule: what it selects, and the dtype in which that runs."""

    kind: _Kind
    pattern: str | type[nn.Module]
    dtype: Dtype
    text: str
    bare: bool = False

    @override
    def __str__(self) -> str:
        return f"{self.text!r}: {dtype_name(self.dtype)}"

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations that an "op" rule is about, none for other rules."""
        return operations_named(str(self.pattern)) if self.kind == "op" else ()

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether the rule is about a module of that name in the model."""
        if self.kind == "module":
            return fnmatchcase(name, str(self.pattern))
        if self.kind == "re":
            return re.fullmatch(str(self.pattern), name) is not None
        if self.kind == "class" and isinstance(self.pattern, str):
            return any(fnmatchcase(text, self.pattern) for text in _class_names(module))
        return self.kind == "class" and isinstance(module, self.pattern)  # type: ignore[arg-type]


def dtype_name(dtype: Dtype) -> str:
    """The short name, as in a rule."""
    return dtype if isinstance(dtype, str) else number_format(dtype).name


PolicyRules = Mapping[Any, Any] | Iterable[Rule | Sequence[Any]]
"""Rules as they are written: a mapping of pattern to dtype, or pairs."""


def parse_rules(rules: PolicyRules) -> tuple[Rule, ...]:
    """Reads rules from a mapping of pattern to dtype, or from pairs; what is a rule already stays as it is."""
    if not isinstance(rules, Iterable) or isinstance(rules, str):
        raise TypeError(
            f"A policy is a mapping of patterns to dtypes, or pairs of them, and got {rules!r}. Write it as in"
            " {'head': 'fp32'}; a plugin's policy may also be 'default' or None."
        )
    pairs = list(rules.items()) if isinstance(rules, Mapping) else list(rules)
    if not pairs:
        raise ValueError("PrecisionPolicy got no rule. Give at least one, as in PrecisionPolicy([('head', 'fp32')]).")
    for pair in pairs:
        if not isinstance(pair, Rule) and (isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2):
            raise TypeError(
                f"PrecisionPolicy takes pairs of a pattern and a dtype, or a mapping, and got {pair!r} as one rule."
                " Write it as in PrecisionPolicy([('blocks.0.*', 'fp32'), (torch.nn.LayerNorm, 'fp32')])."
            )
    return tuple(pair if isinstance(pair, Rule) else _parse_rule(*pair) for pair in pairs)


def _parse_rule(pattern: Any, dtype: Any) -> Rule:
    parsed = _parse_dtype(pattern, dtype)
    if isinstance(pattern, type) and issubclass(pattern, nn.Module):
        return Rule("class", pattern, parsed, f"class:{pattern.__name__}")
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(
            f"The rule {pattern!r}: {dtype!r} is not a pattern. Write a glob over names of modules, 're:' with a"
            " regular expression, a subclass of torch.nn.Module, 'class:' with its name, or 'op:' with a functional"
            " operation."
        )
    prefix, _, rest = pattern.partition(":")
    if rest and prefix in get_args(_Kind):
        rule = Rule(cast(_Kind, prefix), rest, parsed, pattern)
    elif pattern in FAMILIES or pattern in KNOWN_OPERATIONS:
        rule = Rule("op", pattern, parsed, pattern, bare=True)
    else:
        rule = Rule("module", pattern, parsed, pattern, bare=True)
    return _checked(rule)


def _parse_dtype(pattern: Any, dtype: Any) -> Dtype:
    if dtype == LOW:
        return LOW
    found = FORMATS[dtype].torch_dtype if isinstance(dtype, str) and dtype in FORMATS else dtype
    if found in DTYPES:
        return found
    raise ValueError(
        f"The rule {pattern!r}: {dtype!r} has no dtype that autocast can run in. Use one of {', '.join(_NAMES)}"
        f" (the 16 bit of the plugin), or one of {', '.join(str(row) for row in DTYPES)}."
    )


def _checked(rule: Rule) -> Rule:
    if rule.kind == "re":
        try:
            re.compile(str(rule.pattern))
        except re.error as error:
            raise ValueError(f"The rule {rule} is not a regular expression: {error}.") from None
    if rule.kind == "op" and not rule.operations:
        candidates = [*FAMILIES, *sorted(KNOWN_OPERATIONS)]
        raise ValueError(
            f"The rule {rule} names no operation of torch.{near_misses(str(rule.pattern), candidates)}"
            f" Families are {', '.join(FAMILIES)}; any function of torch or torch.nn.functional that does not change"
            " its argument in place can be named."
        )
    return rule


def _class_names(module: nn.Module) -> Iterator[str]:
    """Short and full names of a module's class and its base classes."""
    for kind in type(module).__mro__:
        if issubclass(kind, nn.Module) and kind is not nn.Module:
            yield kind.__name__
            yield f"{kind.__module__}.{kind.__qualname__}"
