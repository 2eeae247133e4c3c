"""What is said of a checkpoint that is written inside an accumulation window, without its gradient."""


def lost_gradient_message(planned: int, position: int) -> str:
    """That a checkpoint written inside a window does not hold its gradient, and what to do instead."""
    return (
        "This checkpoint is written inside an accumulation window, so a run that resumes from it loses the gradient of"
        f" its first {position} of {planned} micro-batches. Save at the end of a window (a multiple of"
        " accumulate_grad_batches), or use AccumulationScheduler(save_partial_gradients=True)."
    )
