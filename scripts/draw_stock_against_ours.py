"""Draws the README's picture: what Lightning's own parts and ours make of one skipped step, a window, and a budget.

.. code-block:: bash

    python scripts/draw_stock_against_ours.py docs/pictures/stock_against_ours.png

A second file, ``..._narrow.png``, has the middle panel alone, for screens of a telephone.

Every value comes from two short runs of the same model on the same batches in fp16, on a CPU: one with
``MixedPrecision`` and ``accumulate_grad_batches``, one with this pack.
"""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler

WINDOW = 4
MICRO_BATCHES = 41  # of one epoch, so that its last window has a single one
OVERFLOW_STEP = 5
BUDGET_TOKENS = 2_050

_VOCABULARY = 32
_STEPS = 20  # of the learning-rate schedule


@dataclass
class Run:
    """What was seen at each optimizer step: learning rate, relative error of the gradient, tokens up to there."""

    learning_rates: list[float] = field(default_factory=list)
    gradient_errors: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Model(pl.LightningModule):
    """A tiny language model. Plain SGD, so that a step's change of the weights tells which gradient it used."""

    def __init__(self, data: Sequence[list[Tensor]]) -> None:
        super().__init__()
        self.run, self._data = Run(), data
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(_VOCABULARY, 16), nn.Linear(16, _VOCABULARY))
        self._window: list[list[Tensor]] = []
        self._tokens = 0

    def loss(self, batch: list[Tensor], reduction: str) -> Tensor:
        """Cross-entropy of the labels other than -100."""
        return cross_entropy(self.net(batch[0]).flatten(0, 1).float(), batch[1].flatten(), reduction=reduction)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean over the tokens of the micro-batch, as everywhere."""
        self._window.append(batch)
        return self.loss(batch, "mean")

    def on_after_backward(self) -> None:
        """Plants the overflow."""
        if self.trainer.global_step == OVERFLOW_STEP:
            self.net[1].bias.grad[0] = torch.inf

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Compares the gradient that the step used with the mean over all tokens of its window."""
        before = parameters_to_vector(self.net.parameters()).detach().clone()
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        after = parameters_to_vector(self.net.parameters()).detach().clone()
        rate = optimizer.param_groups[0]["lr"]
        vector_to_parameters(before, self.net.parameters())
        with torch.enable_grad(), torch.autocast("cpu", torch.float16):
            sums = torch.stack([self.loss(batch, "sum") for batch in self._window]).sum()
        tokens = sum(int((batch[1] != -100).sum()) for batch in self._window)
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(sums / tokens, list(self.net.parameters()))])
        vector_to_parameters(after, self.net.parameters())
        self._window, self._tokens = [], self._tokens + tokens
        self.run.learning_rates.append(rate)
        self.run.gradient_errors.append(float(((before - after) / rate - wanted).norm() / wanted.norm()))
        self.run.tokens.append(self._tokens)

    def configure_optimizers(self) -> Any:
        """SGD and a rate that falls to nought over the planned steps."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = LambdaLR(optimizer, lambda step: max(0.05, 1 - step / _STEPS))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        """The micro-batches as they are."""
        return DataLoader(self._data, batch_size=None)


def micro_batches() -> list[list[Tensor]]:
    """``[inputs, labels]`` of 4 sequences, which end after 2 to 12 tokens; the labels of the padding are -100."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(_VOCABULARY, (4, 13), generator=generator)
        lengths = torch.randint(2, 13, (4, 1), generator=generator)
        made.append([tokens[:, :-1], torch.where(torch.arange(12) < lengths, tokens[:, 1:], -100)])
    return made


def measure() -> tuple[Run, Run]:
    """Lightning's run and ours."""
    data = micro_batches()
    tokens_per_epoch = sum(int((batch[1] != -100).sum()) for batch in data)
    steps_per_epoch = -(-MICRO_BATCHES // WINDOW)
    stock = {
        "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))],
        "accumulate_grad_batches": WINDOW,
        # Lightning counts steps, so a budget of tokens becomes the number of steps that reaches it on average
        "max_steps": math.ceil(BUDGET_TOKENS / tokens_per_epoch * steps_per_epoch),
        "max_epochs": None,
    }
    ours = {
        "plugins": [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10))],
        "callbacks": [AccumulationScheduler({0: WINDOW}), ChinchillaBudget(tokens=BUDGET_TOKENS)],
        "max_epochs": -1,
    }
    runs = []
    for options in (stock, ours):
        model = Model(data)
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            **options,
        )
        with warnings.catch_warnings(action="ignore"):  # of few workers, and of the optimizer_step that looks on
            trainer.fit(model)
        runs.append(model.run)
    return runs[0], runs[1]


# Okabe and Ito's palette, told apart with every kind of colour blindness
_LINES = {"Lightning": ("#D55E00", "s"), "lightning_mp": ("#0072B2", "o")}


def draw(stock: Run, ours: Run, path: Path) -> None:
    """Three panels over the optimizer steps; beside it, for narrow screens, the middle one alone."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 11}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#DDDDDD"}
    runs = {"Lightning": stock, "lightning_mp": ours}
    with mpl.rc_context(style):
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        rate, error, tokens = figure.subplots(1, 3)
        _draw_rates(rate, runs)
        _draw_errors(error, runs)
        _draw_tokens(tokens, runs)
        figure.savefig(path, dpi=110)
        narrow = Figure(figsize=(4.6, 3.6), layout="constrained")
        _draw_errors(narrow.subplots(), runs)
        narrow.savefig(path.with_stem(f"{path.stem}_narrow"), dpi=170)


def _draw_rates(panel: Any, runs: Mapping[str, Run]) -> None:
    around = slice(OVERFLOW_STEP - 3, OVERFLOW_STEP + 5)
    for name, run in runs.items():
        panel.plot(range(len(run.learning_rates))[around], run.learning_rates[around], **_style(name))
    panel.axvline(OVERFLOW_STEP, color="#CC79A7", zorder=1, label="skipped step")
    _finish(panel, "A skipped step keeps its learning rate", "learning rate of the step")
    panel.legend(frameon=False)


def _draw_errors(panel: Any, runs: Mapping[str, Run]) -> None:
    for name, run in runs.items():
        used = [step for step in range(len(run.gradient_errors)) if step != OVERFLOW_STEP]
        panel.plot(used, [100 * run.gradient_errors[step] for step in used], **_style(name))
    last = -(-MICRO_BATCHES // WINDOW) - 1
    panel.annotate(
        f"last window of the\nepoch: 1 micro-\nbatch of {WINDOW}",
        (last, 100 * runs["Lightning"].gradient_errors[last]),
        xytext=(10, 2),
        textcoords="offset points",
        va="top",
    )
    _finish(panel, "Accumulation is the mean over tokens", "error of the gradient, %")
    panel.legend(frameon=False, loc="upper left")


def _draw_tokens(panel: Any, runs: Mapping[str, Run]) -> None:
    for name, run in runs.items():
        panel.plot(range(12, len(run.tokens)), run.tokens[12:], **_style(name))
        panel.annotate(
            f"{run.tokens[-1]:,}",
            (len(run.tokens) - 1, run.tokens[-1]),
            xytext=(-8, 2) if name == "Lightning" else (-4, -16),
            textcoords="offset points",
            ha="right" if name == "Lightning" else "left",
            color=_LINES[name][0],
        )
    panel.axhline(BUDGET_TOKENS, color="#009E73", linestyle="--", label=f"budget, {BUDGET_TOKENS:,}")
    panel.margins(y=0.1)
    _finish(panel, "A budget is spent to the token", "tokens trained on")
    panel.legend(frameon=False, loc="lower right")


def _style(name: str) -> dict[str, Any]:
    color, marker = _LINES[name]
    return {"color": color, "marker": marker, "markersize": 4, "label": name}


def _finish(panel: Any, title: str, ylabel: str) -> None:
    panel.set(title=title, xlabel="optimizer step", ylabel=ylabel)
    panel.xaxis.get_major_locator().set_params(integer=True)


if __name__ == "__main__":
    runs = measure()
    draw(*runs, Path(sys.argv[1]))
    for name, run in zip(("Lightning", "lightning_mp"), runs, strict=True):
        errors = [error for step, error in enumerate(run.gradient_errors) if step != OVERFLOW_STEP]
        print(f"{name}: largest error of a gradient {max(errors):.2%}, tokens {run.tokens[-1]:,} of {BUDGET_TOKENS:,}")
