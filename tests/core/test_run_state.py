"""Where callbacks of this package are placed among those of the Trainer."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from small_models import quiet_trainer

from lightning_mp.ground.core.private_trainer_api import callbacks_of
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.saved_state import COUNT, holding


def test_what_comes_before_checkpoints_comes_before_all_of_them() -> None:
    checkpoints = [ModelCheckpoint(save_last=True), ModelCheckpoint(monitor="mp/overflow_rate")]
    trainer = quiet_trainer(callbacks=[pl.Callback(), *checkpoints], enable_checkpointing=True)
    own = pl.Callback()
    RunState.of(trainer).place_callback(own, "before checkpoints")
    placed = callbacks_of(trainer)
    assert placed.index(own) < min(map(placed.index, checkpoints))


@pytest.mark.parametrize(
    ("value", "fits"), [({"a": 1}, True), ({"a": 1, "b": 2}, False), ({}, False), ({"b": 1}, False), ({"a": -1}, False)]
)
def test_a_mapping_has_these_entries_alone(value: object, fits: bool) -> None:
    assert holding({"a": COUNT}).accepts(value) == fits
