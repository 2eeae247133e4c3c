"""What a run replaces is put back: in any order, whatever was there, and whatever ends the run."""

import contextlib
import copy
import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from small_models import at, quiet_trainer, raising

from lightning_mp.ground.core.patches import Patch, Patches


class Owner:
    def method(self) -> str:
        return "class"


def class_method(owner: Owner) -> str:
    return "method"


def own_attribute(owner: Owner) -> str:
    owner.method = lambda: "own"
    return "method"


def none(owner: Owner) -> str:
    owner.method = None
    return "method"


def absent(owner: Owner) -> str:
    return "other"


BEFORE = {class_method: "class", own_attribute: "own", none: None, absent: None}


def patched(owner: Owner, name: str, label: str) -> Patch:
    patch = Patch(owner, name, lambda: f"{label}({patch.original()})")
    return patch


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("before", BEFORE)
def test_patches_are_undone_in_any_order(before, order):
    owner = Owner()
    name = before(owner)
    attributes = dict(vars(owner))
    patches = {label: patched(owner, name, label) for label in "abc"}
    for index in order:
        patches.pop("abc"[index]).undo()
        expected = BEFORE[before]
        for label in patches:
            expected = f"{label}({expected})"
        if patches:
            assert getattr(owner, name)() == expected
    assert vars(owner) == attributes
    assert not any(key[0] == id(owner) for key in Patch._tops)


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_hooks_that_are_passed_over_are_patches_too(order):
    owner = Owner()
    patches = {
        "a": Patch(owner, "method", lambda: "a"),
        "b": Patch(owner, "method", None),
        "c": patched(owner, "method", "c"),
    }
    for label in order:
        patches.pop(label).undo()
        if "c" in patches:
            assert owner.method() == ("c(None)" if "b" in patches else "c(a)" if "a" in patches else "c(class)")
        elif patches:
            assert owner.method is None if "b" in patches else owner.method() == "a"
    assert vars(owner) == {}


@pytest.mark.parametrize("order", list(itertools.permutations("ab")))
def test_what_others_put_on_top_stays_and_reaches_the_original(order):
    owner = Owner()
    patches = {"a": patched(owner, "method", "a")}
    below = owner.method
    owner.method = foreign = lambda: f"foreign({below()})"
    patches["b"] = patched(owner, "method", "b")
    assert owner.method() == "b(foreign(a(class)))"
    for label in order:
        patches.pop(label).undo()
    assert owner.method is foreign
    assert owner.method() == "foreign(class)"
    owner.method = below  # they take theirs away last
    assert owner.method() == "class"
    assert copy.deepcopy(owner).method() == "class"


def test_undoing_twice_is_once():
    owner = Owner()
    first = patched(owner, "method", "first")
    first.undo()
    second = patched(owner, "method", "second")
    first.undo()
    assert owner.method() == "second(class)"
    second.undo()
    assert vars(owner) == {}


def test_a_patch_is_undone_where_its_block_raises():
    owner = Owner()
    with pytest.raises(KeyError), Patch(owner, "method", lambda: "replaced"):
        raise KeyError
    assert vars(owner) == {}


def test_everything_is_undone_though_something_raises():
    trainer = quiet_trainer()
    trainer.strategy.connect(BoringModel())
    patches, owner = Patches.of(trainer), Owner()
    patches.replace(owner, "method", lambda: "replaced")
    patches.at_end(lambda: {}["missing"])
    patches.replace(owner, "other", lambda: "replaced")
    with pytest.raises(KeyError, match="missing"):
        patches.undo_all()
    assert vars(owner) == {}
    assert not {"teardown", "setup_environment"} & vars(trainer.strategy).keys()


class Replacing(Callback):
    """Replaces methods of everything that a run consists of, and leaves them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        patches = Patches.of(trainer)
        for owner, name in replaced(trainer, pl_module):
            patches.replace(owner, name, None if name == "on_train_epoch_start" else self._noting(owner, name))
        patches.at_end(lambda: self.calls.append("end"))

    def _noting(self, owner: object, name: str) -> Any:
        original = getattr(owner, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return original(*args, **kwargs)

        return replacement


def replaced(trainer: "pl.Trainer", module: "pl.LightningModule") -> list[tuple[object, str]]:
    return [
        (trainer.strategy, "teardown"),
        (trainer.strategy, "optimizer_step"),
        (trainer.precision_plugin, "optimizer_step"),
        (trainer.fit_loop.epoch_loop, "reset"),
        (module, "lr_scheduler_step"),
        (module, "teardown"),
        (trainer.callbacks[0], "on_train_epoch_start"),
    ]


class Ending(BoringModel):
    """Ends in one of the ways that a run can end."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self._end = end

    def _perhaps(self, here: str) -> None:
        if self._end == f"error in {here}":
            raise ZeroDivisionError
        if self._end == f"interrupt in {here}":
            raise KeyboardInterrupt

    def prepare_data(self) -> None:
        self._perhaps("prepare_data")

    def setup(self, stage: str) -> None:
        self._perhaps("setup")

    def configure_model(self) -> None:
        self._perhaps("configure_model")

    def configure_optimizers(self) -> Any:
        self._perhaps("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self._perhaps("on_fit_start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._perhaps("training_step")
        return super().training_step(batch, batch_idx)

    def on_fit_end(self) -> None:
        self._perhaps("on_fit_end")

    def teardown(self, stage: str) -> None:
        self._perhaps("teardown")

    def cpu(self) -> Any:
        # of the strategy's teardown, before it reaches the precision plugin
        self._perhaps("strategy's teardown")
        return super().cpu()


PLACES = (
    "prepare_data",
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "training_step",
    "strategy's teardown",
    "on_fit_end",
    "teardown",
)


def run(trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
    with contextlib.suppress(ZeroDivisionError, SystemExit):
        trainer.fit(module)


@pytest.mark.parametrize("end", ["", *(f"error in {place}" for place in PLACES), "interrupt in training_step"])
def test_nothing_stays_replaced_whatever_ends_a_run(end):
    callback = Replacing()
    trainer, module = quiet_trainer(callbacks=[Callback(), callback], limit_train_batches=1), Ending(end)
    owners = replaced(trainer, module)
    before = [name in vars(owner) for owner, name in owners]
    run(trainer, module)
    assert [name in vars(owner) for owner, name in owners] == before == [False] * len(owners)
    assert callback.calls.count("end") == (end != "error in prepare_data")
    assert "_lightning_mp_patches" not in vars(trainer)


def test_the_next_run_begins_with_what_no_teardown_came_to():
    """Lightning leaves everything as it is where a callback raises in on_exception."""

    callback = Replacing()
    raises = at(raising(ZeroDivisionError("in on_exception")), "on_exception")
    trainer = quiet_trainer(callbacks=[raises, callback], limit_train_batches=1)
    module = Ending("error in training_step")
    run(trainer, module)
    assert "optimizer_step" in vars(trainer.strategy)
    module._end = ""
    trainer.callbacks[1:] = []
    run(trainer, module)
    assert not any(name in vars(owner) for owner, name in replaced(trainer, module))
    assert callback.calls.count("end") == 1
