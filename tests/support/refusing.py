"""What the tests of refusals share."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import fit, loader, quiet_trainer, token_batches, weights

Batches = list[Any]


def tokens() -> Batches:
    """Six batches of seven tokens."""
    return token_batches([7] * 6)


def refused(message: str, module: pl.LightningModule, batches: Batches, **arguments: Any) -> None:
    """Asserts that a fit ends in this very line, before anything happened."""
    before = weights(module)
    trainer = quiet_trainer(enable_checkpointing=True, **arguments)
    micro_batches = trainer.accumulate_grad_batches
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        trainer.fit(module, loader(batches))
    assert all(torch.equal(old, new) for old, new in zip(before, weights(module), strict=True))
    assert trainer.accumulate_grad_batches == micro_batches
    assert "lr_scheduler_step" not in vars(module)
    assert not list(Path().iterdir())


def trains(module: pl.LightningModule, batches: Batches, **arguments: Any) -> pl.Trainer:
    """Asserts that a fit, changed as a message says, moves the weights."""
    before = weights(module)
    trainer = fit(module, batches, **arguments)
    assert not any(torch.equal(old, new) for old, new in zip(before, weights(module), strict=True))
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    return trainer
