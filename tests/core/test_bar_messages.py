"""Messages and warnings of a run begin lines of their own on a terminal, beside a progress bar of tqdm."""

import io
import logging
import re
import warnings
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from small_models import Regression, loader, quiet_trainer, regression_batches

from lightning_mp import AutocastPrecision, OverflowMonitor
from lightning_mp.ground.core.messages import lightning_logger


class Terminal(io.StringIO):
    """What both streams write to."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class Talks(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        lightning_logger().info("a message")

    def on_validation_batch_end(self, *_: Any) -> None:
        warnings.warn("a warning", stacklevel=1)


def written(monkeypatch: pytest.MonkeyPatch, *callbacks: Any, is_terminal: bool, **arguments: Any) -> str:
    terminal = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    logger, handler = lightning_logger(), logging.StreamHandler(terminal)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    # pytest records warnings; without it they go to stderr
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: print(message, file=terminal))
    module = Regression()
    module.validation_step = module.training_step  # type: ignore[method-assign]
    trainer = quiet_trainer(callbacks=[*callbacks, Talks()], max_steps=4, num_sanity_val_steps=0, **arguments)
    before = vars(handler).copy(), warnings.showwarning
    try:
        trainer.fit(module, loader(regression_batches(4)), loader(regression_batches(4)))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert (vars(handler), warnings.showwarning) == before
    return terminal.getvalue()


PARTS: dict[str, dict[str, Any]] = {
    "plugin": {"plugins": [AutocastPrecision("bf16-mixed")]},
    "monitor": {"callbacks": [OverflowMonitor()]},
}


@pytest.mark.filterwarnings("always:a warning")
@pytest.mark.parametrize("part", PARTS)
def test_a_message_begins_its_line(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = dict(PARTS[part])
    bar = TQDMProgressBar(refresh_rate=1)
    text = written(
        monkeypatch, bar, *arguments.pop("callbacks", ()), is_terminal=True, enable_progress_bar=True, **arguments
    )
    # What a terminal shows of a line: what was written after the last return to its beginning.
    lines = [re.split(r"\r|\x1b\[A", line)[-1] for line in text.split("\n")]
    assert lines.count("a message") == 4
    assert lines.count("a warning") == 4
    assert "4/4" in text  # the bar goes on


@pytest.mark.filterwarnings("always:a warning")
def test_a_file_gets_what_it_got_before(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = TQDMProgressBar(refresh_rate=1)
    plugin = AutocastPrecision("bf16-mixed")
    ours = written(monkeypatch, bar, is_terminal=False, enable_progress_bar=True, plugins=[plugin])
    assert "it/s, v_num" in ours or "it/s]a message" in ours
