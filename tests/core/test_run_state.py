"""Where callbacks of this package are placed among those of the Trainer."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from small_models import quiet_trainer

from lightning_mp.core.private_trainer_api import callbacks_of
from lightning_mp.core.run_state import RunState


def test_what_comes_before_checkpoints_comes_before_all_of_them() -> None:
    checkpoints = [ModelCheckpoint(save_last=True), ModelCheckpoint(monitor="mp/overflow_rate")]
    trainer = quiet_trainer(callbacks=[pl.Callback(), *checkpoints], enable_checkpointing=True)
    own = pl.Callback()
    RunState.of(trainer).place_callback(own, "before checkpoints")
    placed = callbacks_of(trainer)
    assert placed.index(own) < min(map(placed.index, checkpoints))
