"""Is this Trainer set up right? Looks at everything, changes nothing, and reports."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_mp.preflight_checks.report import PreflightReport
from lightning_mp.preflight_checks.trainer_inspection import TrainerInspection


def preflight(
    trainer: "pl.Trainer",
    module: "pl.LightningModule",
    data: Any = None,
    *,
    ckpt_path: str | Path | None = None,
    device: str | None = None,
) -> PreflightReport:
    """Checks a Trainer, a module and its data for mistakes before the first step.

    One training step of a copy of the module is made on fake tensors, which have a shape and no data: nothing is
    computed, and memory and time hardly depend on the size of the model. Module, Trainer, random generators and
    gradients are unchanged afterwards. What cannot be checked is in ``not_checked``, with the reason: a step that reads
    numbers (``.item()``, ``if loss > 1``), weights that are sharded already.

    What the Trainer itself refuses is not checked: ``precision=`` beside a precision plugin, for instance, ends in an
    error when the Trainer is made.

    Args:
        trainer: before or in a fit.
        module: that it is to train.
        data: a LightningDataModule, whose data are there; a loader; a mapping or list of loaders; or one batch. None
            takes those of the module.
        ckpt_path: a checkpoint in one file, as it will be given to ``trainer.fit``.
        device: what the run is for, where that is another machine: a chip by name, such as "H100", or "cpu".

    Returns:
        The findings, the most severe first. ``print(report)`` shows them as a table.

    Raises:
        TypeError: if trainer or module is none of ``lightning.pytorch``.
        ValueError: if ``device`` is not known.

    Example:
        >>> import torch
        >>> from lightning_mp.language_model import LanguageModel
        >>> model = LanguageModel(layers=1, heads=1, width=8, total_steps=10, warmup_steps=1).bfloat16()
        >>> trainer = pl.Trainer(accelerator="cpu", max_steps=10, logger=False, enable_checkpointing=False)
        >>> tokens = torch.zeros(2, 8, dtype=torch.long)
        >>> print(preflight(trainer, model, [tokens, tokens]).findings[0].name)
        weights_in_16_bit
    """
    for name, given, wanted in (("trainer", trainer, pl.Trainer), ("module", module, pl.LightningModule)):
        if not isinstance(given, wanted):
            raise TypeError(
                f"preflight({name}=...) takes a lightning.pytorch.{wanted.__name__}, got"
                f" {type(given).__module__}.{type(given).__name__}. Use `import lightning.pytorch as pl`."
            )
    look = TrainerInspection(trainer, module, device)
    return look.report(lambda: look.at_data(data), ckpt_path)
