"""What the pack relies on in Lightning and torch without their promise; a failure names what an upgrade changed."""

import ast
import inspect
import textwrap
import threading
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import loops
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import ModelParallelStrategy
from memory_logger import MemoryLogger
from small_models import Regression, fit, loader, quiet_trainer, regression_batches
from torch import nn
from torch.amp import GradScaler

from lightning_mp.ground.core import (
    private_dispatch_api,
    private_loop_api,
    private_module_api,
    private_optimizer_api,
    private_results_api,
    private_resume_api,
    private_sharding_api,
    private_tensor_api,
    private_trainer_api,
)
from lightning_mp.training.gradients.fused_optimizers import applies_grad_scale

SEAMS = (
    private_dispatch_api,
    private_loop_api,
    private_module_api,
    private_optimizer_api,
    private_resume_api,
    private_results_api,
    private_sharding_api,
    private_tensor_api,
    private_trainer_api,
)
PRIVATE_NAMES = tuple(entry for seam in SEAMS for entry in getattr(seam, "PRIVATE_NAMES", ()))

MADE_BY_INIT = {"_per_optimizer_states"}
#: No class has them as attributes, so the list cannot; other tests guard them.
GUARDED_ELSEWHERE = {
    # below, by test_grad_scaler_keeps_its_state_where_a_subclass_finds_it
    *MADE_BY_INIT,
    # accumulation/test_carry_over_epochs.py, resume/test_resumable_progress.py
    "_detect_anomaly",  # test_the_trainer_knows_whether_it_detects_anomalies
    *("_batches_that_stepped", "_combined_loader", "_combined_loader_states_to_load", "_data_fetcher"),
    "_skip_next_val",
    # modules/test_whole_parameters.py
    *("_handle", "_params", "_shapes", "_param_infos", "_shared_param_infos"),
    # policy/test_policy_sharding.py, strategies/test_fsdp2_strategy.py, test_fsdp2_resting_layers.py,
    # gradients/test_agreed_units.py
    *("_mp_policy", "_data_parallel_size", "_tensor_parallel_size", "_device_mesh", "_all_gather_comm"),
    *("_fsdp_param_group", "_init_mp_dtypes", "_orig_dtype"),
    # precision/test_compressed_ranks.py
    *("_sharded_param_data", "_sharded_local_tensor", "_local_tensor", "_lazy_init"),
    # planning/test_communication.py, distributed/test_buffer_broadcast.py
    *("_forward_pre_hooks", "_forward_hooks", "_non_persistent_buffers_set"),
    # strategies/test_fsdp2_strategy.py
    *("_layer_sync", "_val_check_time_interval"),
    # preflight_checks/test_preflight_facts.py, test_preflight_report.py
    *("_ddp_kwargs", "_accelerator_connector", "_device", "_milestones", "_schedulers"),
    # precision/test_master_weights_checkpoints.py
    "_average_model",
    # accumulation/test_micro_batch_on_oom.py
    *("_zero_grad_fn", "_backward_fn"),
    # resume/test_exact_resume.py
    *("_num_yielded", "_forward_cache", "_computed", "_update_count", "_logger_connector", "_first_loop_iter"),
    "_callback_metrics",
    # resume/test_beside_settings_of_lightning.py
    *("_data_source", "_last_train_dl_reload_epoch", "_last_val_dl_reload_epoch"),
}


# -- the list ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("owner", "name", "reason"), PRIVATE_NAMES, ids=[name for _, name, _ in PRIVATE_NAMES])
def test_every_private_name_is_still_there(owner, name, reason):
    assert hasattr(owner, name)
    assert reason


def test_the_list_has_no_doubles():
    for seam in SEAMS:
        keys = [(owner, name) for owner, name, _ in getattr(seam, "PRIVATE_NAMES", ())]
        assert len(set(keys)) == len(keys)


def test_every_file_of_the_seams_is_looked_at():
    files = {Path(str(seam.__file__)) for seam in SEAMS}
    assert files == set(Path(str(private_trainer_api.__file__)).parent.glob("private_*.py"))


def test_every_private_name_that_the_seams_touch_is_listed():
    """Attributes of others and imported functions."""
    nodes = [node for seam in SEAMS for node in ast.walk(ast.parse(Path(str(seam.__file__)).read_text()))]
    attributes = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    private = {name for name in attributes | imported if name.startswith("_") and not name.startswith("__")}
    assert private - GUARDED_ELSEWHERE - {name for _, name, _ in PRIVATE_NAMES} == set()


# -- torch -------------------------------------------------------------------------------------------------------------


def test_grad_scaler_keeps_its_state_where_a_subclass_finds_it():
    scaler = GradScaler("cpu", 8.0, 3.0, 0.25, 7)
    expected = {
        "_enabled": True,
        "_init_scale": 8.0,
        "_growth_factor": 3.0,
        "_backoff_factor": 0.25,
        "_growth_interval": 7,
        "_init_growth_tracker": 0,
        "_scale": None,
        "_growth_tracker": None,
    }
    assert expected.items() <= vars(scaler).items()
    assert vars(scaler).keys() >= MADE_BY_INIT
    scaler.scale(torch.ones(()))
    scale, tracker = scaler._check_scale_growth_tracker("test")
    assert scale is scaler._scale
    assert tracker is scaler._growth_tracker
    assert (scale.dtype, scale.shape, tracker.dtype, tracker.shape) == (torch.float32, (), torch.int32, ())


def test_grad_scaler_asks_its_subclass_to_unscale_on_both_paths():
    """Names, order and values of the arguments; what is returned becomes the decision."""
    names = ["self", "optimizer", "inv_scale", "found_inf", "allow_fp16"]
    assert list(inspect.signature(GradScaler._unscale_grads_).parameters) == names
    calls = []

    class Recording(GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            calls.append((inv_scale.item(), found_inf.item(), allow_fp16))
            return {found_inf.device: torch.ones(())}

    for fused in (False, True):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        scaler = Recording("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(torch.optim.SGD([parameter], lr=0.1, fused=fused))
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert torch.equal(parameter, torch.ones(2))
    assert calls == [(0.25, 0.0, False), (1.0, 0.0, True)]


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_optimizer_says_so_and_is_handed_scale_and_decision_for_one_step(make_optimizer):
    """torch's protocol, which the plugins use too."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert not getattr(make_optimizer([parameter], lr=0.1), "_step_supports_amp_scaling", False)
    optimizer = make_optimizer([parameter], lr=0.1, fused=True)
    if make_optimizer is torch.optim.Adagrad and torch.__version__.startswith("2.11."):
        assert not applies_grad_scale(optimizer)
        pytest.skip("torch 2.11 does not say that its fused Adagrad unscales, so its gradients are unscaled before")
    assert optimizer._step_supports_amp_scaling is True
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append((o.grad_scale, o.found_inf.item())))
    for unscale_first in (False, True):
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
    assert seen == [(4.0, 0.0), (None, 0.0)]


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_fused_optimizer_divides_by_grad_scale_and_skips_on_found_inf(make_optimizer, found_inf):
    plain, fused = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    plain.grad, fused.grad = torch.tensor([0.5, 3.0]), torch.tensor([0.5, 3.0]) * 8
    reference = make_optimizer([plain], lr=0.1)
    optimizer = make_optimizer([fused], lr=0.1, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found_inf)
    optimizer.step()
    if not found_inf:
        reference.step()
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=0)


def test_the_scale_can_be_asked_for_without_waiting():
    scaler = GradScaler("cpu", init_scale=4.0)
    assert private_optimizer_api.grad_scaler_scale(scaler) is None
    scaler.scale(torch.ones(()))
    assert isinstance(private_optimizer_api.grad_scaler_scale(scaler), torch.Tensor)
    assert private_optimizer_api.grad_scaler_scale(scaler).item() == 4.0
    assert private_optimizer_api.grad_scaler_scale(GradScaler("cpu", enabled=True)) is None


@pytest.mark.parametrize(("found_inf", "scale"), [(0.0, 16.0), (1.0, 4.0)])
def test_a_decision_made_elsewhere_moves_the_scale(found_inf, scale):
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(2):
        private_optimizer_api.record_found_inf(scaler, optimizer, torch.tensor(found_inf))
        scaler.update()
    assert scaler.get_scale() == 8.0 * (scale / 8.0) ** 2
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.update()  # the decision was used up


def test_two_decisions_about_one_optimizer_count_as_the_worse():
    for first, second in [(0.0, 1.0), (1.0, 0.0)]:
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        assert not private_optimizer_api.has_stepped(scaler)
        for found_inf in (first, second):
            private_optimizer_api.record_found_inf(scaler, optimizer, torch.tensor(found_inf))
            assert private_optimizer_api.has_stepped(scaler)
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert not private_optimizer_api.has_stepped(scaler)


def test_the_stage_of_an_optimizer_is_torchs():
    """What torch's own methods set is read, and what is set makes them raise."""
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), torch.inf)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert not private_optimizer_api.has_unscaled(scaler)
    scaler.unscale_(optimizer)
    assert private_optimizer_api.has_unscaled(scaler)
    assert private_optimizer_api.unscaled_found_inf(scaler, [object(), optimizer]) == [torch.tensor(1.0)]
    scaler.step(optimizer)
    assert private_optimizer_api.has_stepped(scaler, optimizer)
    assert private_optimizer_api.unscaled_found_inf(scaler, [optimizer]) is None
    private_optimizer_api.forget_optimizers(scaler, [optimizer])
    assert not private_optimizer_api.has_stepped(scaler)
    private_optimizer_api.set_unscaled(scaler, optimizer, torch.tensor(0.0))
    with pytest.raises(RuntimeError, match="has already been called on this optimizer"):
        scaler.unscale_(optimizer)
    private_optimizer_api.record_found_inf(scaler, optimizer, torch.tensor(0.0))
    with pytest.raises(RuntimeError, match="is being called after step"):
        scaler.unscale_(optimizer)
    private_optimizer_api.forget_optimizers(scaler)
    scaler.unscale_(optimizer)


# -- Lightning ---------------------------------------------------------------------------------------------------------


def uses_of_accumulate_grad_batches():
    """Every expression in Lightning's loops that holds `trainer.accumulate_grad_batches`, innermost operator first."""
    uses = set()
    root = Path(loops.__file__).parent
    for file in sorted(root.rglob("*.py")):
        tree = ast.parse(file.read_text())
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "accumulate_grad_batches":
                uses.add((file.relative_to(root).as_posix(), ast.unparse(parents[node])))
    return uses


def test_lightnings_loops_ask_for_the_window_by_two_modulos_and_divide_the_loss_by_it():
    """The accumulation controller answers these questions and no others: a new one must be thought about."""
    assert uses_of_accumulate_grad_batches() == {
        # zero the gradients first?
        ("optimization/automatic.py", "batch_idx % self.trainer.accumulate_grad_batches"),
        # make the optimizer step?
        ("training_epoch_loop.py", "self.batch_progress.current.ready % self.trainer.accumulate_grad_batches"),
        # the loss is divided by it
        (
            "optimization/automatic.py",
            "self.output_result_cls.from_training_step_output(training_step_output, trainer.accumulate_grad_batches)",
        ),
        # whether a loop that is restarted had finished its epoch
        ("training_epoch_loop.py", "trainer.num_training_batches / trainer.accumulate_grad_batches"),
    }


def test_model_parallel_strategy_sets_itself_up_as_the_seam_does():
    """`set_up_environment_on` does the same with another mesh: a statement that Lightning adds must be added there."""
    source = textwrap.dedent(inspect.getsource(ModelParallelStrategy.setup_environment))
    assert [ast.unparse(statement) for statement in ast.parse(source).body[0].body] == [
        "super().setup_environment()",
        "self._setup_distributed()",
        "if self._data_parallel_size == 'auto':\n    self._data_parallel_size = self.num_nodes",
        "if self._tensor_parallel_size == 'auto':\n    self._tensor_parallel_size = self.num_processes",
        "self._device_mesh = _setup_device_mesh(self._data_parallel_size, self._tensor_parallel_size, self.world_size,"
        " self.root_device)",
        "assert self.lightning_module is not None",
        "self.lightning_module._device_mesh = self._device_mesh",
    ]


def test_lightnings_loops_take_the_value_anew_for_every_batch():
    """What they ask in a run: for each batch whether it is the first of its window and whether it is the last."""
    asked = []

    class Recording(int):
        def __rmod__(self, value):
            asked.append(value)
            return value % int(self)

    trainer = quiet_trainer()
    trainer.accumulate_grad_batches = Recording(2)
    trainer.fit(Regression(), loader(regression_batches(4)))
    assert set(asked) == {0, 1, 2, 3, 4}
    assert trainer.global_step == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_who_observes_operations_may_leave_in_any_order(order):
    """A mode of torch leaves whichever was entered last: callbacks that overlap would go on seeing, or go blind."""
    seen = [[], [], []]
    observers = [
        private_dispatch_api.observe_dispatch(
            lambda operation, *_, log=log: log.append(operation.overloadpacket.__name__)
        )
        for log in seen
    ]
    ones = torch.ones(2)
    for observer in observers:
        observer.__enter__()
    ones.neg()
    for calls, leaving in enumerate(order, start=1):
        observers[leaving].__exit__(None, None, None)
        ones.neg()
        assert seen[leaving] == ["neg"] * calls
    assert [len(log) for log in seen] == [order.index(index) + 1 for index in range(3)]


def test_an_observer_in_another_thread_sees_that_thread_only():
    here, there = [], []

    def elsewhere():
        with private_dispatch_api.observe_dispatch(
            lambda operation, *_: there.append(operation.overloadpacket.__name__)
        ):
            torch.ones(2).neg()

    with private_dispatch_api.observe_dispatch(lambda operation, *_: here.append(operation.overloadpacket.__name__)):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        torch.ones(2).exp()
    assert "neg" in there
    assert "exp" not in there
    assert "exp" in here
    assert "neg" not in here


def test_the_trainer_has_its_callbacks_and_its_profiler():
    mine = Callback()
    trainer = quiet_trainer(callbacks=[mine])
    assert mine in private_trainer_api.callbacks_of(trainer)
    assert private_trainer_api.callbacks_of(trainer) is trainer.callbacks
    assert private_trainer_api.profiler_of(trainer) is trainer.profiler
    assert isinstance(trainer.profiler, PassThroughProfiler)
    replaced = [mine, Callback()]
    private_trainer_api.set_callbacks(trainer, replaced)
    assert trainer.callbacks is replaced


def test_the_loop_keeps_its_limits_where_the_seams_write_them():
    trainer = quiet_trainer(min_steps=3, max_steps=5)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    known = vars(trainer.fit_loop).keys() | vars(trainer.fit_loop.epoch_loop).keys() | vars(progress).keys()
    assert {"max_batches", "min_steps", "max_steps", "is_last_batch"} <= known
    assert trainer.fit_loop.epoch_loop.min_steps == 3
    trainer.fit_loop.epoch_loop.min_steps = None
    private_trainer_api.set_max_steps(trainer, 7)
    assert (trainer.min_steps, trainer.max_steps) == (None, 7)
    before = private_loop_api.replace_end_of_epoch(trainer, (4, True))
    assert (trainer.fit_loop.max_batches, trainer.is_last_batch) == (4, True)
    assert private_loop_api.replace_end_of_epoch(trainer, before) == (4, True)


def test_a_replaced_list_of_callbacks_is_the_one_that_lightning_calls():
    called = []

    class Late(Callback):
        def on_train_batch_start(self, *_):
            called.append("late")

    class Early(Callback):
        def setup(self, trainer, pl_module, stage):
            private_trainer_api.set_callbacks(trainer, [Late(), *private_trainer_api.callbacks_of(trainer)])

    fit(Regression(), regression_batches(2), Early())
    assert called == ["late", "late"]


def watch_hooks(use_seam):
    """The calls that the hooks get, from Lightning's own plugin or through the seam."""
    calls = []

    class Watching(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            calls.append(("callback", type(optimizer).__name__))

    class Module(Regression):
        def on_before_optimizer_step(self, optimizer):
            calls.append(("module", type(optimizer).__name__))

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            calls.append(("clipping", type(optimizer).__name__, gradient_clip_val, gradient_clip_algorithm))

    class ThroughTheSeam(Precision):
        def _after_closure(self, model, optimizer):
            private_optimizer_api.call_before_optimizer_step_hooks(model, optimizer)
            private_optimizer_api.clip_through_module(self, model, optimizer)

    trainer = quiet_trainer(
        callbacks=[Watching()],
        gradient_clip_val=0.5,
        gradient_clip_algorithm="value",
        **({"plugins": [ThroughTheSeam()]} if use_seam else {}),
    )
    trainer.fit(Module(), loader(regression_batches(2)))
    return calls


def test_lightning_passes_over_a_hook_that_is_none():
    """What callbacks/_metrics.py relies on."""
    called = []

    class Looking(Callback):
        def on_train_batch_end(self, *args):
            called.append("batch end")

        def on_before_zero_grad(self, *args):
            called.append("zero grad")

    callback = Looking()
    callback.on_before_zero_grad = None
    fit(Regression(), regression_batches(2), callback)
    assert called == ["batch end"] * 2


def test_the_axis_of_loggers_is_lightnings():
    """`logger_step` is where Lightning logs, also after windows of two; `is_accumulating` holds inside of one."""
    seen = []

    class Looking(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.append((private_trainer_api.logger_step(trainer), private_trainer_api.is_accumulating(trainer)))
            pl_module.log("number", 1.0)

    logger = MemoryLogger()
    trainer = quiet_trainer(callbacks=[Looking()], accumulate_grad_batches=2, logger=logger, log_every_n_steps=1)
    trainer.fit(Regression(), loader(regression_batches(4)))
    assert seen == [(0, True), (0, False), (1, True), (1, False)]
    assert [step for step, _ in logger.rows] == [0, 1]


def test_hooks_before_the_step_are_called_as_lightning_calls_them():
    stock = watch_hooks(use_seam=False)
    assert watch_hooks(use_seam=True) == stock
    assert [call[0] for call in stock] == ["callback", "module", "clipping"] * 2


def test_a_module_that_clips_with_its_own_numbers_reaches_the_plugin_through_the_seam():
    clipped = []

    class Recording(MixedPrecision):
        def clip_gradients(self, optimizer, clip_val=0.0, gradient_clip_algorithm="norm"):
            clipped.append((clip_val, str(gradient_clip_algorithm.value)))

        def _after_closure(self, model, optimizer):
            private_optimizer_api.clip_through_module(self, model, optimizer)

    class Module(Regression):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=0.125, gradient_clip_algorithm="value")

    fit(Module(), regression_batches(1), plugin=Recording("bf16-mixed", "cpu"))
    assert clipped == [(0.125, "value")]


def test_lightning_is_the_version_that_these_guards_were_written_for():
    """Its minor versions; with another one read this file and the changes of Lightning side by side."""
    assert pl.__version__.split(".")[:2] in (["2", "6"], ["2", "7"])


@pytest.mark.parametrize("detect_anomaly", [True, False])
def test_the_trainer_knows_whether_it_detects_anomalies(detect_anomaly):
    assert private_trainer_api.detects_anomalies(quiet_trainer(detect_anomaly=detect_anomaly)) is detect_anomaly
