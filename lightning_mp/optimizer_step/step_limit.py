"""``Trainer(max_steps=...)`` counting the steps that were made, not the attempts."""

import lightning.pytorch as pl

from lightning_mp.core import private_loop_api


class RealStepLimit:
    """Raises the Trainer's ``max_steps`` by one for every skipped step, and puts the user's number back at the end.

    Lightning compares ``max_steps`` with ``trainer.global_step``, which counts attempts. A run with ``max_steps=1000``
    and 30 skips makes 970 steps there, and 1000 with this.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(max_steps=10, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> limit = RealStepLimit(trainer)
        >>> limit.allow_for(skipped_steps=1)
        >>> trainer.max_steps
        11
        >>> limit.detach()
        >>> trainer.max_steps
        10
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        self._asked_max_steps = trainer.max_steps

    def allow_for(self, skipped_steps: int) -> None:
        """So many steps of the run were skipped."""
        if self._asked_max_steps != -1:
            private_loop_api.set_max_steps(self._trainer, self._asked_max_steps + skipped_steps)

    def is_reached(self) -> bool:
        """Whether Lightning would stop now, if no skip is still on its way."""
        return self._trainer.max_steps != -1 and self._trainer.global_step >= self._trainer.max_steps

    def detach(self) -> None:
        """Gives the Trainer the number that the user requested."""
        private_loop_api.set_max_steps(self._trainer, self._asked_max_steps)
