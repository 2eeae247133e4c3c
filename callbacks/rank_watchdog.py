"""Names a rank that hangs and ends the run on all ranks."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_mp.ground.core.arguments import positive_number
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.training.distributed.heartbeat import Heartbeat


class RankWatchdog(SettingsRepr, Callback):
    """Ends a run that makes no progress and names the rank that hangs.

    A rank that hangs (in a data loader, on a lock, on a device) makes the others wait in a collective until the process
    group times out, half an hour by default, with a message about a socket, and the hung process keeps running. With
    this callback two threads in each rank record the hooks that training passes. If a rank has not reached the next
    hook for ``timeout_seconds``, the ranks compare their progress. The one that is behind is named and prints its
    stacks, and all processes end with exit code 75. A rank that cannot even do that (stopped, or holding the GIL) is
    killed by another rank on its machine; for rank 0, which stores the records, this takes twice the timeout. Nothing
    is saved: restart from ``latest_checkpoint``.

    It watches ``fit`` only. The timeout must be longer than the longest time between two hooks: a micro-batch with its
    compilation, a checkpoint, a log entry sent over the network. The ranks must reach rank 0 on a port that the system
    chooses. On a single process a hang in code that holds the GIL is not detected.

    Args:
        timeout_seconds: how long a rank may take to reach its next hook.

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
        self._micro_batch = ""

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer."""
        refuse_other_trainers(self, trainer)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the watch."""
        self._micro_batch = "no micro-batch yet"
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

    # -- beats ---------------------------------------------------------------------------------------------------------

    def _beat(self, place: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(place)

    def _beat_of_validation(self, trainer: "pl.Trainer", hook: str, batch_idx: int, dataloader_idx: int) -> None:
        when = "the sanity check" if trainer.sanity_checking else f"the validation after {self._micro_batch}"
        loader = f" of dataloader {dataloader_idx}" if dataloader_idx else ""
        self._beat(f"{hook} of batch {batch_idx}{loader} in {when}")

    @override
    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """A beat, as the hooks below."""
        self._beat(f"on_train_epoch_start of epoch {trainer.current_epoch}")

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        # Remembered: after the last one of an epoch Lightning counts otherwise.
        self._micro_batch = f"micro-batch {batch_idx} in epoch {trainer.current_epoch}"
        self._beat(f"on_train_batch_start of {self._micro_batch}")

    @override
    def on_before_backward(self, *_: Any) -> None:
        self._beat(f"on_before_backward of {self._micro_batch}")

    @override
    def on_after_backward(self, *_: Any) -> None:
        self._beat(f"on_after_backward of {self._micro_batch}")

    def needs_gradients(self, step_index: int) -> bool:
        """False: a beat needs no unscaled gradients; with stock plugins it also beats before the step."""
        return False

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._beat(f"on_before_optimizer_step of {self._micro_batch}")

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._beat(f"on_train_batch_end of {self._micro_batch}")

    @override
    def on_validation_batch_start(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._beat_of_validation(trainer, "on_validation_batch_start", batch_idx, dataloader_idx)

    @override
    def on_validation_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._beat_of_validation(trainer, "on_validation_batch_end", batch_idx, dataloader_idx)

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self._beat(f"on_train_epoch_end after {self._micro_batch}")

    @override
    def on_train_end(self, *_: Any) -> None:
        self._beat(f"on_train_end after {self._micro_batch}")

    # -- the end -------------------------------------------------------------------------------------------------------

    @override
    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Waits for the other ranks, and stops watching."""
        trainer.strategy.barrier("RankWatchdog")
        self._stop()

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Tells the other ranks why this one ended."""
        self._stop(f"{type(exception).__name__}: {str(exception).partition(chr(10))[0]}")

    def _stop(self, error: str = "") -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop(error)
            # After an exception the reports stay readable until this process ends.
            self._heartbeat = self._heartbeat if error else None

    @override
    def on_save_checkpoint(self, *_: Any) -> None:
        self._beat(f"on_save_checkpoint after {self._micro_batch}")
