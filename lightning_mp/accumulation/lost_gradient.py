"""The warning about a checkpoint that is written inside an accumulation window, without its gradient."""

from lightning.fabric.utilities.rank_zero import rank_zero_warn


def warn_about_lost_gradient(planned: int, position: int) -> None:
    """Warns that a checkpoint written inside a window does not hold its gradient."""
    rank_zero_warn(
        "This checkpoint is written inside an accumulation window, so a run that resumes from it loses the gradient of"
        f" its first {position} of {planned} micro-batches. Save at the end of a window (a multiple of"
        " accumulate_grad_batches), or use AccumulationScheduler(save_partial_gradients=True)."
    )
