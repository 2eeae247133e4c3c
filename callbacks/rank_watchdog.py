"""A rank that hangs is named and ended, and all others with it."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_mp.callbacks._common import refuse_other_trainers
from lightning_mp.core.arguments import positive_number
from lightning_mp.core.settings_repr import SettingsRepr
from lightning_mp.distributed.heartbeat import Heartbeat

__all__ = ["RankWatchdog"]


class RankWatchdog(SettingsRepr, Callback):
    """Ends a run that makes no progress, with a message that names the rank that hangs.

    A rank that hangs (in a data loader, on a lock, on a device) makes the others wait in a collective until the process
    group times out, half an hour by default, with a message about a socket; the hung process itself stays behind. Here
    two threads in each rank record the hooks that training passes. When a rank has not reached the next one for
    ``timeout_seconds``, the ranks compare how far they are. The one that is behind is named, prints its stacks, and all
    processes end with exit code 75. One that cannot even do that (stopped, or holding Python's lock) is killed by
    another rank on its machine; if that is rank 0, which stores the records, this takes twice the timeout. Nothing is
    saved then: start again from ``latest_checkpoint``.

    It watches ``fit`` from its start to its end. The timeout must be longer than the longest time between two hooks: a
    micro-batch with its compilation, a checkpoint, a log entry over the network. The ranks must reach rank 0 on a port
    that the system chooses. On a single process a hang in code that holds Python's lock is not seen.

    Args:
        timeout_seconds: how long a rank may be silent.

    Raises:
        ValueError: if it is not a positive number.

    Example:
        >>> RankWatchdog(timeout_seconds=300).timeout_seconds
        300
    """

    def __init__(self, *, timeout_seconds: float = 600) -> None:
        self.timeout_seconds = positive_number(
            timeout_seconds,
            "timeout_seconds",
            "RankWatchdog",
            unit="seconds",
            hint="Give more than a micro-batch, a validation batch or a checkpoint takes; for instance 600.",
        )
        self._heartbeat: Heartbeat | None = None

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer."""
        refuse_other_trainers(self, trainer)

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the watch."""
        strategy = trainer.strategy
        environment = getattr(strategy, "cluster_environment", None)
        self._heartbeat = Heartbeat(
            trainer.global_rank,
            trainer.world_size,
            self.timeout_seconds,
            host=environment.main_address if environment is not None else "127.0.0.1",
            broadcast=strategy.broadcast,
            barrier=strategy.barrier,
        )

    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Waits for the other ranks, and stops watching."""
        trainer.strategy.barrier("RankWatchdog")
        self._stop()

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Tells the other ranks why this one has left."""
        self._stop(f"{type(exception).__name__}: {str(exception).partition(chr(10))[0]}")

    def _stop(self, error: str = "") -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop(error)
            # After an exception the reports stay readable until this process ends.
            self._heartbeat = self._heartbeat if error else None

    def needs_gradients(self, step_index: int) -> bool:
        """Our precision plugins need not make true gradients for a beat; stock ones beat before the step, too."""
        return False

    # -- beats ---------------------------------------------------------------------------------------------------------

    def _beat(self, trainer: "pl.Trainer", place: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(
                f"{place} of micro-batch {trainer.fit_loop.batch_idx} in epoch {trainer.current_epoch}"
            )

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """A beat, as the hooks below."""
        self._beat(trainer, "on_train_epoch_start")

    def on_train_batch_start(self, trainer: "pl.Trainer", *_: Any) -> None:  # noqa: D102
        self._beat(trainer, "on_train_batch_start")

    def on_before_backward(self, trainer: "pl.Trainer", *_: Any) -> None:  # noqa: D102
        self._beat(trainer, "on_before_backward")

    def on_after_backward(self, trainer: "pl.Trainer", *_: Any) -> None:  # noqa: D102
        self._beat(trainer, "on_after_backward")

    def on_before_optimizer_step(self, trainer: "pl.Trainer", *_: Any) -> None:  # noqa: D102
        self._beat(trainer, "on_before_optimizer_step")

    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:  # noqa: D102
        self._beat(trainer, "on_train_batch_end")

    def on_validation_batch_start(self, trainer: "pl.Trainer", *_: Any) -> None:  # noqa: D102
        self._beat(trainer, "a validation batch after on_train_batch_end")

    def on_validation_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:  # noqa: D102
        self._beat(trainer, "a validation batch after on_train_batch_end")

    def on_save_checkpoint(self, trainer: "pl.Trainer", *_: Any) -> None:  # noqa: D102
        self._beat(trainer, "on_save_checkpoint")

    def on_train_epoch_end(self, trainer: "pl.Trainer", *_: Any) -> None:  # noqa: D102
        self._beat(trainer, "on_train_epoch_end")

    def on_train_end(self, trainer: "pl.Trainer", *_: Any) -> None:  # noqa: D102
        self._beat(trainer, "on_train_end")
