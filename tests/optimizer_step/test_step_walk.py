"""A step and a micro-batch read top to bottom: how often their walk changes from file to file of the pack."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from small_models import (
    Regression,
    TokenModel,
    fit,
    fused_adamw,
    loader,
    quiet_trainer,
    regression_batches,
    token_batches,
)
from torch import nn

import lightning_mp
from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, OverflowMonitor

PRODUCT = Path(lightning_mp.__file__).resolve().parent.parent
FOLDERS = ("lightning_mp", "callbacks", "strategies")
# 25 and 28 when it was written; 62 before for the fused one, which grew by two with every parameter.
MOST_CHANGES = {"fused": 26, "foreach": 30}
# 30 and 71 now; 63 and 109 before, when each fact was asked for in each micro-batch.
MOST_CHANGES_OF_A_MICRO_BATCH = {"plain": 30, "closes its window": 71}


class Walk:
    """The files of the pack in the order of their calls; neighbours that are alike count once."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._named: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call":
            return
        source = frame.f_code.co_filename
        if source not in self._named:
            path = Path(source).resolve()
            inside = path.is_relative_to(PRODUCT) and path.relative_to(PRODUCT).parts[0] in FOLDERS
            self._named[source] = str(path.relative_to(PRODUCT)) if inside else None
        name = self._named[source]
        if name is not None and self.files[-1:] != [name]:
            self.files.append(name)

    @property
    def changes(self) -> int:
        return len(self.files) - 1


class Walked(AutocastPrecision):
    """Looks at every step from the end of backward until the plugin returns."""

    def __init__(self) -> None:
        super().__init__("16-mixed", scaler=LossScaler(init_scale=8.0))
        self.walks: list[Walk] = []

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        walk, before = Walk(), sys.getprofile()

        def unseen() -> Any:
            sys.setprofile(before)
            result = closure()
            sys.setprofile(walk)
            return result

        sys.setprofile(walk)
        try:
            return super().optimizer_step(optimizer, model, unseen, **kwargs)
        finally:
            sys.setprofile(before)
            self.walks.append(walk)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_the_walk_through_a_step_changes_files_seldom(kind: str) -> None:
    """AdamW, 16-mixed, clipping by norm and OverflowMonitor; the same for a model of twice as many parameters."""
    counts = []
    for layers in (1, 2):
        module = Regression(lambda parameters: torch.optim.AdamW(parameters, **{kind: True}))
        module.net = nn.Sequential(module.net, *[nn.Linear(1, 1) for _ in range(layers - 1)])
        plugin = Walked()
        fit(module, regression_batches(4), OverflowMonitor(), max_steps=4, plugin=plugin, gradient_clip_val=0.5)
        assert len(plugin.walks) == 4
        counts.append([walk.changes for walk in plugin.walks[2:]])
        assert plugin.walks[-1].files[0] == "lightning_mp/training/precision/base.py"
        assert any(file.endswith("callbacks/overflow_monitor.py") for file in plugin.walks[-1].files)
    assert counts[0] == counts[1]
    assert max(counts[0]) <= MOST_CHANGES[kind], "\n".join(plugin.walks[-1].files)


def test_the_walk_of_a_micro_batch_changes_files_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the fetch of the next batch to the end of this one, with windows of two and weights from losses."""
    walks: list[Walk] = []
    advance = _TrainingEpochLoop.advance

    def walked(self: Any, *args: Any, **kwargs: Any) -> Any:
        walks.append(Walk())
        before = sys.getprofile()
        sys.setprofile(walks[-1])
        try:
            return advance(self, *args, **kwargs)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(_TrainingEpochLoop, "advance", walked)
    trainer = quiet_trainer(
        max_epochs=1,
        max_steps=-1,
        gradient_clip_val=1.0,
        plugins=[AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=8.0))],
        callbacks=[OverflowMonitor(), AccumulationScheduler({0: 2})],
    )
    trainer.fit(TokenModel(fused_adamw), loader(token_batches([6] * 8)))
    for walk, (kind, most) in zip(walks[4:6], MOST_CHANGES_OF_A_MICRO_BATCH.items(), strict=True):
        assert walk.changes <= most, f"{kind}: {walk.changes}\n" + "\n".join(walk.files)
        assert "lightning_mp/training/accumulation/windows.py" in walk.files
