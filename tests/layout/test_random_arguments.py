"""Promise: whatever a public class is given, it works, or an error of our own says what is allowed."""

import datetime
import importlib
import inspect
import re
import traceback
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import lightning
import pytest
import torch
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_mp

PACKAGES = ("checkpoints", "diagnostics", "metrics", "pipelining", "planning")
#: Arguments that have to be there for the others to be looked at.
NEEDED = {
    "AccumulationScheduler": {"schedule": {0: 2}},
    "ActivationCheckpointing": {"modules": "blocks.*"},
    "AutocastPrecision": {"precision": "bf16-mixed"},
    "BudgetForecast": {"metric": "loss"},
    "MasterWeightsPrecision": {"precision": "bf16-true"},
    "PrecisionPolicy": {"rules": {"head": "fp32"}},
    "TokenLearningRate": {"schedule": lightning_mp.WarmupCosine()},
}
#: No callables: what a function of the user raises is the user's.
ODD = [
    None, True, False, 0, 1, -1, 2, 10**12, 0.5, -0.5, 2.0**16, float("nan"), float("inf"), -float("inf"), 3 + 4j,
    "", "a", "nan", "-3", "1.5B", "auto", "step", "token", "fp16", "bf16", "16-mixed", "bf16-mixed", "bf16-true", b"x",
    [], (), {}, {0: 1}, {"0": "2"}, {-1: 2}, {"*": "fp32"}, [1], ["a"], [None], {1, 2}, range(3), slice(1),
    object(), torch.float16, torch.device("cpu"), Path("x"),
    datetime.timedelta(seconds=3),
]  # fmt: skip


def public_classes() -> dict[str, type]:
    packages = [lightning_mp, *(importlib.import_module(f"lightning_mp.{name}") for name in PACKAGES)]
    named = {name: getattr(package, name) for package in packages for name in package.__all__}
    return {
        name: value
        for name, value in named.items()
        if inspect.isclass(value) and not issubclass(value, BaseException) and not getattr(value, "_is_protocol", False)
    }


def arguments_of(kind: type) -> list[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, parameter in inspect.signature(kind).parameters.items() if parameter.kind in by_name]


CLASSES = public_classes()
#: Results that are handed out, with fields that are not checked: those that need more than one argument.
PARTS = sorted(
    name
    for name, kind in CLASSES.items()
    if all(
        parameter.default is not parameter.empty or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        or argument in NEEDED.get(name, {})
        for argument, parameter in inspect.signature(kind).parameters.items()
    )
)  # fmt: skip


def is_our_own(error: Exception) -> bool:
    """Whether it was raised on purpose: by a `raise`, here or in Lightning, with words."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = (str(Path(lightning_mp.__file__).resolve().parents[1]), str(Path(lightning.__file__).parent))
    return last.filename.startswith(ours) and "raise" in (last.line or "") and len(str(error)) > 20


def check(name: str, arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = CLASSES[name](**NEEDED.get(name, {}) | arguments)
        except (ValueError, TypeError, MisconfigurationException) as error:
            if not is_our_own(error):
                raise
        else:
            assert repr(made)


def test_the_parts_of_a_trainer_are_looked_at() -> None:
    assert {"AccumulationScheduler", "FSDP2Strategy", "LossScaler", "PrecisionPolicy", "TF32Precision"} <= set(PARTS)
    assert len(PARTS) >= 25


def arguments_with(word: str) -> list[tuple[str, str, bool, bool]]:
    """Class, argument, and whether None and numbers are allowed as well, where a type mentions the word."""
    found = []
    for name in [*PARTS, "DecoderConfig"]:
        for argument, parameter in inspect.signature(CLASSES[name]).parameters.items():
            annotation = str(parameter.annotation)
            if word in annotation or (word == "bool" and isinstance(parameter.default, bool)):
                found.append((name, argument, "None" in annotation, "int" in annotation))
    return found


BOOLEANS, FUNCTIONS = arguments_with("bool"), arguments_with("Callable")


def refused(name: str, argument: str, value: object) -> str:
    needed = NEEDED.get(name, {}) | ({"layers": 2, "width": 64, "vocabulary": 256} if name == "DecoderConfig" else {})
    with pytest.raises(ValueError, match=re.escape(argument)) as caught:
        CLASSES[name](**needed | {argument: value})
    assert repr(value) in str(caught.value)
    return str(caught.value)


def test_an_argument_that_is_true_or_false_is_nothing_else() -> None:
    """The string "false", as a configuration may have it, is true for Python."""
    assert len(BOOLEANS) >= 18
    for name, argument, or_none, or_number in BOOLEANS:
        numbers = [0, -1, 1.5] if or_number else [0, 1, 1.5]
        for value in ["no", "False", "", [], *numbers, *([] if or_none else [None])]:
            said = refused(name, argument, value)
            assert "True" in said, f"{name}({argument}={value!r}): {said}"
            assert "False" in said, f"{name}({argument}={value!r}): {said}"


def test_an_argument_that_is_a_function_is_nothing_else() -> None:
    assert len(FUNCTIONS) >= 7
    for name, argument, _or_none, _or_number in FUNCTIONS:
        for value in (3, "len", [len]):
            assert "function" in refused(name, argument, value)


@pytest.mark.full
@pytest.mark.parametrize("name", PARTS)
def test_each_argument_takes_or_refuses_anything(name: str) -> None:
    for argument in arguments_of(CLASSES[name]):
        for value in ODD:
            check(name, {argument: value})


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_any_arguments_together_are_taken_or_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(PARTS))
    chosen = data.draw(st.lists(st.sampled_from([*arguments_of(CLASSES[name]), ""]), max_size=3, unique=True))
    check(name, {argument: data.draw(st.sampled_from(ODD), label=argument) for argument in chosen if argument})
