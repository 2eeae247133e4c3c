"""Checks of what a training step did: the loss it returned, and the ways around the precision plugin."""

from collections.abc import Iterator

from lightning_mp.core.messages import listed
from lightning_mp.preflight_checks.found import Found
from lightning_mp.preflight_checks.report import PreflightFinding, Severity


def check_refusals(found: Found) -> Iterator[PreflightFinding]:
    """Whether a callback will refuse the run, and whether the training step mixes dtypes."""
    for name, reason in found.refusals:
        what, _, cure = reason.rpartition(". ")
        yield PreflightFinding("error", "refused", (what and f"{what}.") or f"{name} refuses the run.", cure)
    if found.dtype_error:
        stored = found.precision.name.endswith("-true")
        yield PreflightFinding(
            "error",
            "dtypes",
            f"training_step ends in an error of torch about dtypes under {found.precision.plugin}: {found.dtype_error}",
            "Cast what is fp32 where it is used, for instance `x + self.table.to(x.dtype)`, or use AutocastPrecision."
            if stored
            else "Cast one side where they come together (`b.to(a.dtype)`): autocast leaves this operation alone. Or"
            " give its module a rule: policy={'name.of.module': 'fp32'}.",
        )


def check_loss_divided_twice(found: Found) -> Iterator[PreflightFinding]:
    """Whether a module divides its loss by the length of the accumulation window, which is done for it."""
    step = found.step
    lengths = {length for length in found.run.window_lengths if length > 1}
    if step is None or found.run.is_manual or step.loss_divisor not in lengths:
        return
    number = f"{step.loss_divisor:g}"
    if step.divisor_follows:
        yield PreflightFinding(
            "error",
            "loss_divided_twice",
            f"training_step divides the loss by trainer.accumulate_grad_batches ({number}), and so does the Trainer:"
            f" gradients are {number} times too small.",
            "Return the loss as it is.",
        )
    else:
        yield PreflightFinding(
            "warning",
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
        yield PreflightFinding(
            "error",
            "step_past_plugin",
            "optimizer_step runs the closure itself and calls optimizer.step() without it:"
            f" {precision.plugin} then never makes a step.",
            "Call optimizer.step(closure=optimizer_closure), or use a precision plugin of lightning_mp.",
        )


def check_clipping(found: Found) -> Iterator[PreflightFinding]:
    """Whether the Trainer's clipping value reaches the gradients."""
    if found.step is not None and found.step.ignores_clipping:
        yield PreflightFinding(
            "warning",
            "clipping_ignored",
            "Trainer(gradient_clip_val=...) is set, and the module's configure_gradient_clipping does nothing with it:"
            " gradients are not clipped.",
            "Call self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm) there, or leave the value"
            " out.",
        )


def check_dropout_in_recompute(found: Found) -> Iterator[PreflightFinding]:
    """Whether recomputed modules draw the random numbers of their forward."""
    if found.step is not None and found.step.draws_anew:
        yield PreflightFinding(
            "error",
            "dropout_in_recompute",
            "Modules that run again in backward (activation checkpointing) draw other random numbers than in their"
            " forward: dropout has another mask there, and gradients are wrong.",
            "Leave preserve_rng_state at True in torch.utils.checkpoint, or use ActivationCheckpointing(...).",
        )
