"""Checks of how long the run is: against schedulers, a budget, a checkpoint, and the memory of one step."""

import math
from collections.abc import Iterator

from lightning_mp.core.messages import listed
from lightning_mp.core.quantities import format_bytes
from lightning_mp.preflight_checks.found import Found, FoundCheckpoint, FoundRun, FoundScheduler
from lightning_mp.preflight_checks.report import PreflightFinding

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
        end = "it never completes" if too_long else _AT_THE_END[scheduler.after_its_end]
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
    return PreflightFinding(
        "warning",
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
        yield PreflightFinding(
            "warning",
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
    if run.max_steps is not None and run.window_lengths:
        limits[f"max_steps={run.max_steps}"] = run.max_steps * max(run.window_lengths)
    for setting, micro_batches in limits.items():
        tokens = micro_batches * budget.micro_batch_tokens
        if tokens < budget.tokens:
            yield PreflightFinding(
                "warning",
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
        "Use a smaller micro-batch with accumulation, ActivationCheckpointing(...), FSDP2Strategy(), or"
        " MicroBatchOnOOM(), which halves micro-batches that do not fit.",
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
        yield PreflightFinding(
            "error",
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
    if differences:
        yield PreflightFinding(
            "error",
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
        yield PreflightFinding(
            "error",
            "checkpoint",
            f"{checkpoint.path} has optimizers with groups of {_groups(saved)} parameters, and the run has"
            f" {_groups(own)}.",
            "Return the same optimizers and groups from configure_optimizers as in the run before.",
        )
    elif len(checkpoint.learning_rates) == len(checkpoint.own_learning_rates):
        pairs = zip(checkpoint.learning_rates, checkpoint.own_learning_rates, strict=True)
        for number, (saved_rate, own_rate) in enumerate(pairs):
            if saved_rate != own_rate:
                yield PreflightFinding(
                    "warning",
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
        yield PreflightFinding(
            "warning",
            "checkpoint",
            f"{checkpoint.path} holds {has}, and {found.precision.plugin} {now}: the run continues in another"
            " precision.",
            "If that is not intended, use the plugin of the earlier run.",
        )
