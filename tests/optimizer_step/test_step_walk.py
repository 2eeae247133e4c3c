"""One step reads top to bottom: how often the walk of an optimizer through its step changes from file to file."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from small_models import Regression, loader, quiet_trainer, regression_batches
from torch import nn

import lightning_mp
from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor

PRODUCT = Path(lightning_mp.__file__).resolve().parent.parent
FOLDERS = ("lightning_mp", "callbacks", "strategies")
# 25 and 28 when it was written; 62 before for the fused one, which grew by two with every parameter.
MOST_CHANGES = {"fused": 26, "foreach": 30}


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
        trainer = quiet_trainer(max_steps=4, plugins=[plugin], callbacks=[OverflowMonitor()], gradient_clip_val=0.5)
        trainer.fit(module, loader(regression_batches(4)))
        assert len(plugin.walks) == 4
        counts.append([walk.changes for walk in plugin.walks[2:]])
        assert plugin.walks[-1].files[0] == "lightning_mp/precision/base.py"
        assert any(file.endswith("callbacks/overflow_monitor.py") for file in plugin.walks[-1].files)
    assert counts[0] == counts[1]
    assert max(counts[0]) <= MOST_CHANGES[kind], "\n".join(plugin.walks[-1].files)
