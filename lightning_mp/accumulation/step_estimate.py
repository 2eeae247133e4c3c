"""How many optimizer steps a run makes under a schedule: the number that learning-rate schedulers ask for."""

import math

from lightning_mp.accumulation.schedule import Progress, WindowSchedule


def estimate_steps(
    schedule: WindowSchedule,
    batches_per_epoch: int,
    *,
    max_epochs: int = -1,
    max_steps: int = -1,
    micro_batch_samples: int = 0,
    carry_over: bool = False,
) -> int | float:
    """Counts optimizer steps by walking through the windows of the run.

    .. code-block:: text

        for every epoch:  left <- batches_per_epoch
            while left > 0:  left <- left - min(left, N(progress));  steps <- steps + 1
        up to max_steps

    Example:
        >>> from lightning_mp.accumulation.schedule import Thresholds
        >>> estimate_steps(Thresholds({0: 1, 2: 4}), 10, max_epochs=4)  # 10 + 10 + 3 + 3
        26
    """
    if "token" in schedule.units:
        raise ValueError(
            "The number of optimizer steps of a schedule in tokens is not known before the run: how many tokens a"
            " batch has is known only once it is loaded. Let the learning rate follow tokens too, or give a schedule"
            " in steps or samples."
        )
    if max_epochs == -1 and max_steps == -1:
        return math.inf
    if batches_per_epoch < 1:
        return 0
    steps = epoch = samples = last_window = planned = position = 0
    while (max_epochs == -1 or epoch < max_epochs) and (max_steps == -1 or steps < max_steps):
        left = batches_per_epoch
        another_follows = max_epochs == -1 or epoch + 1 < max_epochs
        while left > 0 and (max_steps == -1 or steps < max_steps):
            if position == 0:
                seen = samples - last_window
                progress = Progress(epoch=epoch, step=steps, samples=seen, micro_batch_samples=micro_batch_samples)
                planned = schedule.micro_batches(progress)
            taken = min(left, planned - position)
            left -= taken
            position += taken
            if position < planned and carry_over and another_follows:
                break
            steps += 1
            last_window = position * micro_batch_samples
            samples += last_window
            position = 0
        epoch += 1
    return steps
