"""Everything that a preflight checks: each check maps what was found to findings, and reads nothing else."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import get_args

from lightning_mp.ground.core.float8_gains import UNCOMPILED_FP8
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.quantities import format_bytes
from lightning_mp.ground.modules.compiled_names import COMPILED_PREFIX
from lightning_mp.monitors.preflight_checks.found import Found, FoundCheckpoint, FoundRun, FoundWeight
from lightning_mp.monitors.preflight_checks.report import PreflightFinding, Severity
from lightning_mp.training.lr_schedule.scheduler_facts import FoundScheduler
from lightning_mp.training.optimizer_step.loss_scaler import ANOMALIES_UNDER_A_SCALE

_error, _warning, _advice = (partial(PreflightFinding, severity) for severity in get_args(Severity))

# -- what a run computes in: device, loss scale, format of the weights, sizes of the products --------------------------

# NVIDIA, Matrix Multiplication Background User's Guide, table 1: tensor cores need multiples of 16 bytes; on A100 and
# later they are most efficient with multiples of 128 bytes. torch._scaled_mm needs multiples of 16 in fp8.
_MULTIPLE_OF = {"fp16": 8, "bf16": 8, "fp8": 16}
_BEST_MULTIPLE = 64
# Sizes below the first come from the data as a rule (channels of an image, classes); padding up to the second multiple
# pays where the product is large.
_SMALLEST_SIZE, _SMALLEST_LARGE_SIZE = 64, 1024
_SMALLEST_SAVING_BYTES = 2**20  # by another format of weights, below which nobody looks for memory


def check_device(found: Found) -> Iterator[PreflightFinding]:
    """Whether the device multiplies in the format that was requested."""
    device, precision = found.device, found.precision
    what = f"{precision.plugin} needs {precision.base}, and {device.name}"
    if device.accelerator == "mps":
        if precision.base in ("fp64", "fp8"):
            yield _error("device", f"{what} has no such numbers.", "Use Trainer(precision='32-true') or '16-mixed'.")
        return
    if device.accelerator != "cuda" or precision.base in device.formats:
        return
    if precision.base == "fp8" and not precision.emulates_fp8:
        cure = "AutocastPrecision('bf16-mixed')" if "bf16" in device.formats else "AutocastPrecision('16-mixed')"
        yield _error("device", f"{what} ({device.generation}) has no fp8 units.", f"Use {cure}.")
    elif precision.base == "bf16":
        yield _warning(
            "device",
            f"{what} ({device.generation}) has no bf16 units: bf16 is emulated there and slow.",
            "Use AutocastPrecision('16-mixed')."
            if "fp16" in device.formats
            else "Use Trainer(precision='32-true'), which is faster on this device.",
        )
    elif precision.base == "fp16":
        yield _warning(
            "device",
            f"{what} ({device.generation}) has no fp16 units: nothing gets faster.",
            "Use Trainer(precision='32-true').",
        )


def check_fp8(found: Found) -> Iterator[PreflightFinding]:
    """Whether fp8 makes the run faster than bf16."""
    precision = found.precision
    if precision.base != "fp8":
        return
    if precision.no_fp8_layer:
        what, _, cure = precision.no_fp8_layer.rpartition(". ")
        yield _error("fp8", f"{what}.", cure)
    elif not precision.is_compiled:
        what, _, cure = UNCOMPILED_FP8.rpartition(". ")
        yield _advice("fp8", f"{precision.plugin}: {what}.", cure)


def check_scaler(found: Found) -> Iterator[PreflightFinding]:
    """Whether a loss scale is missing, or there is one too many."""
    precision = found.precision
    if precision.base == "fp16" and not precision.has_scaler and not precision.own_scalers:
        weights = precision.name.endswith("-true")
        yield _error(
            "scaler_missing",
            f"{precision.plugin} computes gradients in fp16 without a loss scale: those below 6e-8 become 0, and"
            " training stalls without an error.",
            "Use MasterWeightsPrecision('16-true'), which scales and keeps fp32 masters."
            if weights
            else "Use AutocastPrecision('16-mixed'), or give the plugin a scaler that is enabled.",
        )
    if precision.own_scalers and precision.has_scaler:
        yield _error(
            "scaler_superfluous",
            f"{precision.plugin} scales the loss, and so does a GradScaler in the module"
            f" ({listed(precision.own_scalers)}): losses are scaled twice and gradients unscaled once.",
            "Remove the module's GradScaler and its calls; give the plugin its settings: scaler=LossScaler(...).",
        )
    elif precision.base == "bf16" and (precision.own_scalers or precision.has_scaler):
        owner = f"the module's {listed(precision.own_scalers)}" if precision.own_scalers else precision.plugin
        yield _warning(
            "scaler_superfluous",
            f"{owner} scales the loss of a bf16 run: bf16 has the range of fp32, so a scale prevents nothing, and steps"
            " may be skipped that need not be.",
            "Remove the scaler.",
        )


def check_anomaly_detection(found: Found) -> Iterator[PreflightFinding]:
    """Whether autograd's detection of anomalies would end the run at an overflow that the scale expects."""
    if found.run.detects_anomalies and found.precision.has_scaler:
        what, _, cure = ANOMALIES_UNDER_A_SCALE.partition(". ")
        yield _error("detect_anomaly", f"{found.precision.plugin}: {what}.", cure)


def check_precisions(found: Found) -> Iterator[PreflightFinding]:
    """Whether precision is set in two places; ``precision=`` beside a plugin is refused by the Trainer itself."""
    precision = found.precision
    if precision.of_strategy:
        yield _warning(
            "two_precisions",
            f"Precision is set twice, by {precision.plugin} and by {precision.of_strategy}, which wins where they"
            " differ.",
            "Leave the strategy's setting out; the plugin tells the strategy what it needs.",
        )


def check_weights_in_16_bit(found: Found) -> Iterator[PreflightFinding]:
    """Whether an optimizer would step 16-bit weights without fp32 masters."""
    precision = found.precision
    if precision.has_masters:
        return
    if precision.name in ("16-true", "bf16-true"):
        yield _warning(
            "weights_in_16_bit",
            f"{precision.plugin} casts the weights to {precision.base}, and the optimizer steps them there: updates"
            " smaller than about 1/256 (bf16) or 1/2048 (fp16) of a weight are lost.",
            f"Use MasterWeightsPrecision({precision.name!r}), which keeps fp32 masters.",
        )
        return
    for dtype in ("float16", "bfloat16"):
        weights = [weight for weight in found.weights if weight.is_trainable and weight.dtype == dtype]
        if weights:
            trainable = sum(weight.is_trainable for weight in found.weights)
            has_frozen = any(weight.dtype == dtype and not weight.is_trainable for weight in found.weights)
            yield PreflightFinding(
                "error" if dtype == "float16" else "warning",
                "weights_in_16_bit",
                f"{len(weights)} of {trainable} trainable parameters are {dtype}"
                f" ({listed([weight.names[0] for weight in weights], 3)}), and {precision.plugin} keeps no fp32 masters"
                " of them: small updates are lost"
                + (", and Adam's epsilon and small second moments are 0." if dtype == "float16" else "."),
                (
                    "Cast the trainable ones alone: p.data = p.data.float() (PEFT leaves modules_to_save), or use"
                    if has_frozen
                    else "Load the model in fp32 (dtype=torch.float32, or module.float()), or use"
                )
                + f" MasterWeightsPrecision('{'16' if dtype == 'float16' else 'bf16'}-true').",
            )


def check_frozen_weights(found: Found) -> Iterator[PreflightFinding]:
    """Whether frozen weights take 4 bytes each where autocast rounds them to 16 bit at each use."""
    precision = found.precision
    if precision.base not in ("bf16", "fp16") or not (precision.has_masters or precision.name.endswith("-mixed")):
        return
    frozen = [weight for weight in found.weights if not weight.is_trainable and weight.dtype == "float32"]
    num_bytes = 4 * sum(weight.elements for weight in frozen)
    if num_bytes // 2 < _SMALLEST_SAVING_BYTES or len(frozen) == len(found.weights):
        return
    dtype = "torch.bfloat16" if precision.base == "bf16" else "torch.float16"
    yield _advice(
        "frozen_in_fp32",
        f"{len(frozen)} frozen parameters are fp32 ({_names(frozen)}): they take {format_bytes(num_bytes)}, and are"
        f" cast to 16 bit at each use. In 16 bit they take {format_bytes(num_bytes // 2)}.",
        f"Load the frozen base in 16 bit: from_pretrained(..., dtype={dtype}), or base.to({dtype}) before adapters are"
        " added. Keep in fp32 what code updates, such as a target network.",
    )


def check_tensor_cores(found: Found) -> Iterator[PreflightFinding]:
    """Whether dimensions of matrix products are multiples of what tensor cores take."""
    multiple = _MULTIPLE_OF.get(found.precision.base)
    if multiple is None or found.device.accelerator != "cuda":
        return
    layers_of: dict[tuple[str, int], list[str]] = {}
    for layer in found.layers:
        for dimension, size in layer.sizes:
            layers_of.setdefault((dimension, size), []).append(layer.name)
    for (dimension, size), names in layers_of.items():
        smallest = 0 if dimension == "head_dim" else _SMALLEST_SIZE
        wanted = multiple if size % multiple else _BEST_MULTIPLE
        if size < smallest or not size % wanted or (wanted == _BEST_MULTIPLE and size < _SMALLEST_LARGE_SIZE):
            continue
        best = _BEST_MULTIPLE if size >= _SMALLEST_LARGE_SIZE else wanted
        yield _advice(
            "tensor_cores",
            f"{dimension} of {listed(names, 3)} is {size}, not a multiple of {wanted}: "
            + (
                "tensor cores are not used, or in part only."
                if wanted == multiple
                else "tensor cores are used, not at their best."
            ),
            f"Make it {-(-size // best) * best}.",
        )


# -- what a training step did: the loss it returned, and the ways around the precision plugin --------------------------


def check_refusals(found: Found) -> Iterator[PreflightFinding]:
    """Whether a callback will refuse the run, and whether the training step mixes dtypes."""
    for name, reason in found.refusals:
        what, _, cure = reason.rpartition(". ")
        yield _error("refused", (what and f"{what}.") or f"{name} refuses the run.", cure)
    if found.dtype_error and found.refused_in_16_bit is None:
        stored = found.precision.name.endswith("-true")
        yield _error(
            "dtypes",
            f"training_step ends in an error of torch about dtypes under {found.precision.plugin}: {found.dtype_error}",
            "Cast what is fp32 where it is used, for instance `x + self.table.to(x.dtype)`, or use AutocastPrecision."
            if stored
            else "Cast one side where they come together (`b.to(a.dtype)`): autocast leaves this operation alone. Or"
            " give its module a rule: policy={'name.of.module': 'fp32'}.",
        )


def check_refused_in_16_bit(found: Found) -> Iterator[PreflightFinding]:
    """Whether torch refuses an operation in the 16-bit format that its input has."""
    if found.refused_in_16_bit is None:
        return
    dtype, refused = found.refused_in_16_bit
    owner = "" if found.precision.takes_a_policy else " The argument is AutocastPrecision's."
    yield _error(
        "dtypes",
        f"{refused.operation} ({refused.place}) has a {dtype} input under {found.precision.plugin}, and"
        f" {refused.reason} there: torch raises an error.",
        f"{refused.cure}{owner}",
    )


def check_loss_divided_twice(found: Found) -> Iterator[PreflightFinding]:
    """Whether a module divides its loss by the length of the accumulation window, which is done for it."""
    step = found.step
    lengths = {length for length in found.run.window_lengths if length > 1}
    if step is None or found.run.is_manual or step.loss_divisor not in lengths:
        return
    number = f"{step.loss_divisor:g}"
    if step.divisor_follows:
        yield _error(
            "loss_divided_twice",
            f"training_step divides the loss by trainer.accumulate_grad_batches ({number}), and so does the Trainer:"
            f" gradients are {number} times too small.",
            "Return the loss as it is.",
        )
    else:
        yield _warning(
            "loss_divided_twice",
            f"The last thing that training_step does to the loss is a division by {number}, the number of micro-batches"
            " per optimizer step, by which the Trainer divides it as well.",
            "If this is meant for accumulation, return the loss as it is.",
        )


def check_step_past_plugin(found: Found) -> Iterator[PreflightFinding]:
    """Whether a backward or a step goes past the precision plugin."""
    step, precision = found.step, found.precision
    if step is None:
        return
    severity: Severity = "error" if precision.has_scaler else "warning"
    then = (
        "gradients are not scaled as the plugin takes them to be"
        if precision.has_scaler
        else "the plugin does not see it, and trainer.global_step may not count it"
    )
    if step.raw_backwards:
        yield PreflightFinding(
            severity,
            "step_past_plugin",
            f"training_step calls loss.backward() itself, bypassing {precision.plugin}: {then}.",
            "Call self.manual_backward(loss).",
        )
    if step.raw_steps:
        where = "training_step" if found.run.is_manual else "optimizer_step"
        yield PreflightFinding(
            severity,
            "step_past_plugin",
            f"{where} calls step() of the bare optimizer ({listed(step.raw_steps)}), past {precision.plugin}: {then}.",
            "Call step() on what self.optimizers() returns."
            if found.run.is_manual
            else "Call optimizer.step(closure=optimizer_closure) on the argument, not on its attribute `.optimizer`.",
        )
    if step.closure_before_step and precision.has_scaler and precision.needs_closure:
        yield _error(
            "step_past_plugin",
            "optimizer_step runs the closure itself and calls optimizer.step() without it:"
            f" {precision.plugin} then never makes a step.",
            "Call optimizer.step(closure=optimizer_closure), or use a precision plugin of lightning_mp.",
        )


def check_clipping(found: Found) -> Iterator[PreflightFinding]:
    """Whether the Trainer's clipping value is one, and reaches the gradients."""
    if found.run.clip_value is not None and found.run.clip_value < 0:
        yield _error(
            "clipping_ignored",
            f"Trainer(gradient_clip_val={found.run.clip_value}) is negative: Lightning clips nothing, silently.",
            "Give a positive value, or leave it out.",
        )
    if found.step is not None and found.step.ignores_clipping:
        yield _warning(
            "clipping_ignored",
            "Trainer(gradient_clip_val=...) is set, and the module's configure_gradient_clipping does nothing with it:"
            " gradients are not clipped.",
            "Call self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm) there, or leave the value"
            " out.",
        )


def check_dropout_in_recompute(found: Found) -> Iterator[PreflightFinding]:
    """Whether recomputed modules draw the random numbers of their forward."""
    if found.step is not None and found.step.draws_anew:
        yield _error(
            "dropout_in_recompute",
            "Modules that run again in backward (activation checkpointing) draw other random numbers than in their"
            " forward: dropout has another mask there, and gradients are wrong.",
            "Leave preserve_rng_state at True in torch.utils.checkpoint, or use ActivationCheckpointing(...).",
        )


# -- parameters: which are trained, which are frozen, which are one ----------------------------------------------------


def check_untrained_weights(found: Found) -> Iterator[PreflightFinding]:
    """Whether parameters that require a gradient are trained by an optimizer."""
    if found.weights and not any(weight.is_trainable for weight in found.weights):
        yield _error(
            "untrained_weights",
            f"None of the {len(found.weights)} parameters has requires_grad=True: there is nothing to train.",
            "Unfreeze what is to be trained: module.head.requires_grad_(True).",
        )
    forgotten = [weight for weight in found.weights if weight.is_trainable and weight.is_optimized is False]
    if forgotten:
        trains = any(weight.is_trainable and weight.is_optimized for weight in found.weights)
        yield PreflightFinding(
            "warning" if trains else "error",
            "untrained_weights",
            f"{len(forgotten)} parameters have requires_grad=True and belong to no optimizer ({_names(forgotten)}):"
            " they never change, and their gradients are computed and clipped with the others.",
            "Give them to an optimizer, or freeze them with requires_grad_(False).",
        )


def check_unused_weights(found: Found) -> Iterator[PreflightFinding]:
    """Whether DDP would wait for gradients that do not come."""
    unused = [weight for weight in found.weights if weight.is_trainable and weight.has_gradient is False]
    if found.run.needs_all_gradients and not found.run.is_manual and unused:
        yield _error(
            "unused_weights",
            f"{len(unused)} trainable parameters got no gradient from a training step ({_names(unused)}): under DDP the"
            " second step ends with 'Expected to have finished reduction in the prior iteration'.",
            "Freeze or remove them, or use strategy='ddp_find_unused_parameters_true'.",
        )


def check_frozen_statistics(found: Found) -> Iterator[PreflightFinding]:
    """Whether frozen norms keep learning their running statistics."""
    layers = [layer.name for layer in found.layers if layer.is_frozen and layer.learns_statistics]
    if layers:
        yield _warning(
            "frozen_statistics",
            f"The weights of {len(layers)} BatchNorm layers are frozen, and their running statistics are not"
            f" ({listed(layers, 3)}): they follow the new data, and the frozen part does not stay what it was.",
            "Call .eval() on the frozen part in on_train_epoch_start as well, unless it is a teacher that your code"
            " updates and that uses the statistics of its batches (BYOL, MoCo).",
        )


def check_eval_mode(found: Found) -> Iterator[PreflightFinding]:
    """Whether layers that are to be trained are in eval mode."""
    if found.in_eval:
        yield _warning(
            "eval_mode",
            f"{len(found.in_eval)} dropout or BatchNorm layers beside trainable weights are in eval mode"
            f" ({listed(found.in_eval, 3)}), and Lightning leaves them so: nothing is dropped, and running statistics"
            " do not change.",
            "Call module.train() before the fit; from_pretrained returns models in eval mode.",
        )


def check_tied_weights(found: Found) -> Iterator[PreflightFinding]:
    """Whether weights that seem to be one are one."""
    by_memory: dict[int, list[FoundWeight]] = {}
    for weight in found.weights:
        if weight.memory is not None and weight.is_trainable:
            by_memory.setdefault(weight.memory, []).append(weight)
    for sharing in by_memory.values():
        if len(sharing) > 1:
            yield _error(
                "tied_weights",
                f"{_names(sharing)} share their memory and are different parameters: each gets a part of the gradient,"
                " an optimizer steps the memory once for each, and a cast or a move to another device separates them.",
                "Tie them as one parameter: head.weight = embedding.weight.",
            )
    for pair in found.untied:
        yield _warning(
            "tied_weights",
            f"The model's config says tie_word_embeddings=True, and {pair} are different parameters.",
            "Call tie_weights() on the model after loading or replacing its embeddings.",
        )


def _names(weights: Sequence[FoundWeight]) -> str:
    return listed([weight.names[0] for weight in weights], 3)


# -- how long the run is: against schedulers, a budget, a checkpoint, and the memory of one step -----------------------

# A schedule that is planned a little too long or too short is often meant so (T_max = max_epochs - 1).
_TOLERANCE = 0.05
_AT_THE_END = {
    "raises": "and then raises an error",
    "rises": "and then its learning rate rises again",
    "zero": "and then its learning rate stays at its last value, often 0",
}


def check_schedulers(found: Found) -> Iterator[PreflightFinding]:
    """Whether learning-rate schedulers were planned for the steps or epochs that the run has."""
    if found.run.is_manual:
        return
    for scheduler in found.schedulers:
        if scheduler.planned == math.inf:
            yield _never_falls(scheduler)
            continue
        in_epochs = scheduler.interval == "epoch"
        calls = found.run.epochs if in_epochs else found.run.steps
        if calls is None:
            continue
        made = calls // scheduler.frequency
        unit = "epochs" if in_epochs else "optimizer steps"
        late = made - scheduler.planned
        too_long = late < -_slack(made)
        too_short = late > (0 if scheduler.after_its_end == "raises" else _slack(made))
        if not too_long and not (too_short and scheduler.after_its_end != "stays"):
            continue
        end = "so it never completes" if too_long else _AT_THE_END[scheduler.after_its_end]
        yield PreflightFinding(
            "error" if too_short and scheduler.after_its_end == "raises" else "warning",
            "scheduler_length",
            f"{scheduler.name}({scheduler.setting}={scheduler.planned:,}) is called {made:,} times (after every"
            f" {f'{scheduler.frequency} {unit}' if scheduler.frequency > 1 else unit.removesuffix('s')}), {end}."
            f"{_guess(scheduler, found.run)}",
            f"Give it {scheduler.setting}={made:,}"
            + (
                ", or return {'scheduler': ..., 'interval': 'step'} and self.trainer.estimated_stepping_batches steps."
                if in_epochs
                else ": self.trainer.estimated_stepping_batches knows the number of optimizer steps."
            ),
        )


def _never_falls(scheduler: FoundScheduler) -> PreflightFinding:
    return _warning(
        "scheduler_length",
        f"{scheduler.name}({scheduler.setting}=inf) never changes the learning rate: without max_epochs and max_steps"
        " the Trainer does not know how many optimizer steps the run has.",
        "With ChinchillaBudget use TokenLearningRate(WarmupCosine()), which follows the budget; else give max_steps.",
    )


def _slack(calls: int) -> float:
    return max(1, _TOLERANCE * calls)


def _guess(scheduler: FoundScheduler, run: FoundRun) -> str:
    """Which other number was taken for the right one."""
    epochs, steps, planned = run.epochs, run.steps, scheduler.planned
    micro_batches = (
        None if epochs is None or run.micro_batches_per_epoch is None else epochs * run.micro_batches_per_epoch
    )
    if scheduler.interval == "epoch" and steps is not None and abs(planned - steps) <= _slack(steps):
        return " That is the number of optimizer steps, and its interval is 'epoch', Lightning's default."
    if scheduler.interval == "step" and planned == epochs:
        return " That is the number of epochs."
    if scheduler.interval == "step" and planned == micro_batches:
        return " That is the number of micro-batches, of which several make one optimizer step."
    if steps is not None and run.data_ranks > 1 and planned == steps * run.data_ranks:
        return f" That is the number for one device; there are {run.data_ranks}."
    return ""


def check_budget(found: Found) -> Iterator[PreflightFinding]:
    """Whether the data and the limits of the Trainer reach the budget."""
    budget, run = found.budget, found.run
    if budget is None:
        return
    if budget.frozen_fraction >= 0.5:
        yield _warning(
            "budget",
            f"The budget of {budget.tokens:,} tokens counts all parameters, and {budget.frozen_fraction:.0%} of them"
            " are frozen.",
            "Use ChinchillaBudget(parameters='trainable'), or give tokens=.",
        )
    if budget.micro_batch_tokens is None:
        return
    limits = {}
    if run.epochs is not None and run.micro_batches_per_epoch is not None:
        limits[f"max_epochs={run.epochs}"] = run.epochs * run.micro_batches_per_epoch
    longest_window = max(run.window_lengths, default=budget.window_micro_batches)
    if run.max_steps is not None and longest_window is not None:
        limits[f"max_steps={run.max_steps}"] = run.max_steps * longest_window
    for setting, micro_batches in limits.items():
        tokens = micro_batches * budget.micro_batch_tokens
        if tokens < budget.tokens:
            yield _warning(
                "budget",
                f"The budget of {budget.tokens:,} tokens is out of reach: with {setting} there are {micro_batches:,}"
                f" micro-batches of about {budget.micro_batch_tokens:,} tokens, {tokens:,} in all.",
                "Use Trainer(max_epochs=-1) without max_steps, more data, or a smaller budget.",
            )


def check_memory(found: Found) -> Iterator[PreflightFinding]:
    """Whether one micro-batch fits on the device."""
    memory = found.memory
    if memory is None or memory.reserved_bytes <= memory.available_bytes:
        return
    fits_barely = memory.live_bytes <= memory.available_bytes
    yield PreflightFinding(
        "warning" if fits_barely else "error",
        "memory",
        f"A training step needs {format_bytes(memory.live_bytes)} of live tensors, and {found.device.name} has"
        f" {format_bytes(memory.available_bytes)}"
        + (
            f"; with what an allocator may lose it is up to {format_bytes(memory.reserved_bytes)}."
            if fits_barely
            else ": it will not fit."
        ),
        "Use a smaller micro-batch with accumulation, ActivationCheckpointing(...),"
        f"{' FSDP2Strategy(),' if found.run.data_ranks > 1 else ''} or MicroBatchOnOOM(), which halves micro-batches"
        " that do not fit.",
    )


def check_reused_weights(found: Found) -> Iterator[PreflightFinding]:
    """Whether autograd keeps several 16-bit copies of the same weights (Lightning #21611)."""
    if found.step is None or found.step.copied_bytes < _SMALLEST_SAVING_BYTES:
        return
    name, copies = max(found.step.weight_copies, key=lambda weight: weight[1])
    others = len(found.step.weight_copies) - 1
    yield _advice(
        "reused_weights",
        f"{name}{f' and {others} more weights are' if others else ' is'} used several times in a step (up to {copies}),"
        " and each use keeps a 16-bit copy for backward: together"
        f" {format_bytes(found.step.copied_bytes)} more than one copy each.",
        "If memory is short, use AutocastPrecision(..., cache_weights=True), which keeps one; the gradients of all uses"
        " are then summed in 16 bit, and weights that change inside a step are stale.",
    )


def check_checkpoint(found: Found) -> Iterator[PreflightFinding]:
    """Whether a checkpoint holds this run, and leaves something of it to do."""
    checkpoint = found.checkpoint
    if checkpoint is None:
        return
    yield from _other_weights(checkpoint)
    yield from _other_optimizers(checkpoint)
    yield from _other_precision(checkpoint, found)
    done = [
        f"{name}={limit}"
        for name, limit, reached in (
            ("max_steps", found.run.max_steps, checkpoint.global_step),
            ("max_epochs", found.run.epochs, checkpoint.epochs_done),
        )
        if limit is not None and reached >= limit
    ]
    if done:
        yield _error(
            "checkpoint",
            f"{checkpoint.path} is at step {checkpoint.global_step:,} after {checkpoint.epochs_done}"
            f" {'epoch' if checkpoint.epochs_done == 1 else 'epochs'}, and"
            f" {listed(done)} ends the run before that: nothing will be trained.",
            "Raise the limit; it counts from the start of the first run.",
        )


def _other_weights(checkpoint: FoundCheckpoint) -> Iterator[PreflightFinding]:
    differences = [
        f"{len(names)} {which} ({listed(names, 3)})"
        for which, names in (
            ("missing in it", checkpoint.missing),
            ("unknown to the module", checkpoint.unexpected),
            ("of another shape", checkpoint.reshaped),
        )
        if names
    ]
    if differences and any(COMPILED_PREFIX in name for name in (*checkpoint.missing, *checkpoint.unexpected)):
        yield _error(
            "checkpoint",
            f"{checkpoint.path} and the module differ in what torch.compile(module) puts into names:"
            f" {listed(differences)}.",
            "Add ExactResume() to the callbacks, which translates names on load, or compile with module.compile().",
        )
    elif differences:
        yield _error(
            "checkpoint",
            f"{checkpoint.path} was written for another model: {listed(differences)}.",
            "Build the module with the checkpoint's hyper-parameters, or load only its weights:"
            " module.load_state_dict(..., strict=False), without ckpt_path.",
        )


def _other_optimizers(checkpoint: FoundCheckpoint) -> Iterator[PreflightFinding]:
    saved, own = checkpoint.optimizers, checkpoint.own_optimizers
    if saved is None or own is None:
        return
    if saved != own:
        yield _error(
            "checkpoint",
            f"{checkpoint.path} has optimizers with groups of {_groups(saved)} parameters, and the run has"
            f" {_groups(own)}.",
            "Return the same optimizers and groups from configure_optimizers as in the run before.",
        )
    elif len(checkpoint.learning_rates) == len(checkpoint.own_learning_rates):
        pairs = zip(checkpoint.learning_rates, checkpoint.own_learning_rates, strict=True)
        for number, (saved_rate, own_rate) in enumerate(pairs):
            if saved_rate != own_rate:
                yield _warning(
                    "checkpoint",
                    f"configure_optimizers gives parameter group {number} a learning rate of {own_rate:g}, and"
                    f" {checkpoint.path} has {saved_rate:g}, which is restored and wins.",
                    "To change it on a resume, set it in on_train_start; or load only the weights.",
                )


def _groups(optimizers: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join("[" + ", ".join(map(str, groups)) + "]" for groups in optimizers) or "none"


def _other_precision(checkpoint: FoundCheckpoint, found: Found) -> Iterator[PreflightFinding]:
    if checkpoint.has_scale != found.precision.has_scaler:
        has, now = ("a loss scale", "has none") if checkpoint.has_scale else ("no loss scale", "starts with a new one")
        yield _warning(
            "checkpoint",
            f"{checkpoint.path} holds {has}, and {found.precision.plugin} {now}: the run continues in another"
            " precision.",
            "If that is not intended, use the plugin of the earlier run.",
        )


# -- all of them, in the order of a report -----------------------------------------------------------------------------

CHECKS = (
    check_refusals,
    check_device,
    check_fp8,
    check_scaler,
    check_anomaly_detection,
    check_precisions,
    check_weights_in_16_bit,
    check_frozen_weights,
    check_refused_in_16_bit,
    check_step_past_plugin,
    check_loss_divided_twice,
    check_clipping,
    check_dropout_in_recompute,
    check_untrained_weights,
    check_unused_weights,
    check_tied_weights,
    check_frozen_statistics,
    check_eval_mode,
    check_schedulers,
    check_budget,
    check_memory,
    check_reused_weights,
    check_checkpoint,
    check_tensor_cores,
)


def check_everything(found: Found) -> tuple[PreflightFinding, ...]:
    """All findings, the most severe first."""
    findings = [finding for check in CHECKS for finding in check(found)]
    return tuple(sorted(findings, key=lambda finding: get_args(Severity).index(finding.severity)))
