"""A class with several of Lightning's hooks has them in the order in which a run calls them."""

import ast
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from small_models import Regression, fit, regression_batches

ROOT = Path(__file__).resolve().parents[2]

# The hooks of callbacks, modules, strategies and precision plugins, and `on_after_optimizer_step`, which is ours. What
# goes into checkpoints and comes out of them is together, before the end.
ORDER = """
    setup_environment setup configure_callbacks configure_model on_fit_start convert_module setup_optimizers connect
    on_sanity_check_start on_sanity_check_end
    on_train_start on_train_epoch_start on_train_batch_start convert_input forward_context train_step_context
    val_step_context test_step_context predict_step_context training_step convert_output on_before_zero_grad
    on_before_backward pre_backward backward on_after_backward post_backward on_before_optimizer_step
    configure_gradient_clipping clip_gradients clip_grad_by_norm clip_grad_by_value optimizer_step
    on_after_optimizer_step lr_scheduler_step on_train_batch_end
    on_validation_model_eval on_validation_start on_validation_epoch_start on_validation_batch_start validation_step
    on_validation_batch_end on_validation_epoch_end on_validation_end on_validation_model_train
    on_train_epoch_end on_train_end on_fit_end
    on_test_start on_test_epoch_start on_test_batch_start test_step on_test_batch_end on_test_epoch_end on_test_end
    on_predict_start on_predict_epoch_start on_predict_batch_start predict_step on_predict_batch_end
    on_predict_epoch_end on_predict_end on_exception
    state_dict on_save_checkpoint save_checkpoint load_checkpoint load_state_dict on_load_checkpoint
    teardown
"""
PLACE = {hook: place for place, hook in enumerate(ORDER.split())}


def hooks_of_classes() -> dict[str, list[str]]:
    found = {}
    for folder in ("lightning_mp", "callbacks", "strategies"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                    found[f"{file.stem}.{node.name}"] = [name for name in methods if name in PLACE]
    return {name: hooks for name, hooks in found.items() if len(hooks) > 1}


HOOKS = hooks_of_classes()


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_in_the_order_in_which_they_run(name):
    assert HOOKS[name] == sorted(HOOKS[name], key=PLACE.__getitem__)


class Recorder(Callback):
    """Keeps the hooks of callbacks in the order of their first calls."""

    def __init__(self) -> None:
        self.called: dict[str, None] = {}

    def __getattribute__(self, name: str) -> Any:
        if name in PLACE and name != "state_dict":
            self.called.setdefault(name)
        return super().__getattribute__(name)


class Validated(Regression):
    def validation_step(self, batch: Any) -> None:
        pass


def test_the_order_is_that_of_a_run():
    recorder = Recorder()
    fit(Validated(), regression_batches(2), recorder, validation=regression_batches(1), num_sanity_val_steps=0)
    called = list(recorder.called)
    assert {"setup", "on_before_zero_grad", "on_validation_batch_end", "on_train_epoch_end", "teardown"} <= set(called)
    assert called == sorted(called, key=PLACE.__getitem__)
