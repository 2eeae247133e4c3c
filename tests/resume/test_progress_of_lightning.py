"""What ResumableProgress corrects, without it: a test that fails here says that a workaround can go."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from restarts import (
    MOMENTS,
    SAVES,
    Interruption,
    Save,
    SizedStream,
    Traced,
    Validated,
    ValidatedByEpoch,
    interrupted,
    trace,
)
from small_models import at, quiet_trainer, raising

from lightning_mp import AtomicCheckpoints

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]


class CountsSteps(Traced):
    """Asks for the number of steps before the checkpoint is read, which makes the loader."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


#: What is saved, before which micro-batches the run is interrupted, its limit.
CORRECTED: dict[str, tuple[Save, tuple[int, ...], dict[str, Any]]] = {
    # Lightning-AI/pytorch-lightning#19617
    "in on_train_epoch_end, with max_steps": (SAVES["each epoch"], (5, 5), {"max_epochs": -1, "max_steps": 12}),
    # Lightning-AI/pytorch-lightning#20550
    "the number of steps is asked for": (Save(MOMENTS["each step"], CountsSteps), (3,), {"max_epochs": 3}),
    # not reported; Lightning-AI/pytorch-lightning#14702 has brought it
    "ReduceLROnPlateau": (Save(MOMENTS["each step"], Validated), (3,), {"max_epochs": 3}),
}


@pytest.mark.parametrize("row", CORRECTED.values(), ids=list(CORRECTED))
def test_what_resumable_progress_corrects_is_still_wrong_without_it(
    row: tuple[Save, tuple[int, ...], dict[str, Any]], tmp_path: Path
) -> None:
    save, before, limit = row
    straight = interrupted(tmp_path / "straight", (), list, save, SizedStream, **limit)
    stock = interrupted(tmp_path / "stock", before, list, save, SizedStream, **limit)
    ours = interrupted(tmp_path / "ours", before, lambda: [AtomicCheckpoints()], save, SizedStream, **limit)
    assert ours == straight
    assert stock != straight


def test_a_validation_that_was_due_is_left_out(tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#20288: the checkpoint of the batch before it was written, then the run ended."""
    seen = {}
    for name, make in {"stock": list, "ours": lambda: [AtomicCheckpoints()]}.items():
        saves = {"every_n_train_steps": 2, "save_top_k": 0, "save_last": True}
        trainers = [
            quiet_trainer(
                callbacks=[*make(), ModelCheckpoint(tmp_path / name, **saves), *fails],
                enable_checkpointing=True,
                num_sanity_val_steps=0,
                val_check_interval=2,
            )
            for fails in ([at(raising(Interruption()), "on_validation_start")], [])
        ]
        events = trace(trainers, SizedStream, tmp_path / name / "last.ckpt", module=ValidatedByEpoch).events
        seen[name] = {step for event, step, _ in events if event == "validation_step"}
    assert seen == {"stock": {4}, "ours": {2, 4}}
