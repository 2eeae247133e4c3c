"""Promise: what ranks were given differently is named on all of them, before it hangs or trains different weights."""

import datetime
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gloo import on_ranks, process_group, run_ranks
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, fit, regression_batches
from torch.optim import SGD, AdamW, Optimizer

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    FSDP2Strategy,
    LossScaler,
    MasterWeightsPrecision,
    MFUMonitor,
    OverflowPostMortem,
)
from lightning_mp.training.distributed import rank_settings
from lightning_mp.training.distributed.rank_settings import exchanged


def with_betas(parameters: Any, beta: float) -> Optimizer:
    first, *others = parameters
    return AdamW([{"params": [first]}, {"params": others, "betas": (beta, 0.999)}], lr=0.1)


def frozen_on(rank: int) -> Regression:
    module = Regression()
    module.net[0].requires_grad_(rank == 0)
    return module


#: What one rank is given, and what the message says of rank 0 and rank 1.
DIFFERENT: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "precision": (
        lambda rank: {"plugin": AutocastPrecision("bf16-mixed" if rank else "16-mixed")},
        "the precision plugin: rank 0 has '16-mixed', scaler=",
    ),
    "scale": (
        lambda rank: {"plugin": AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0 + rank))},
        "the precision plugin: rank 0 has scaler=LossScaler(device='cpu', init_scale=2.0",
    ),
    "class": (
        lambda rank: {"plugin": AutocastPrecision("bf16-mixed") if rank else MasterWeightsPrecision("bf16-true")},
        "the precision plugin: rank 0 has MasterWeightsPrecision, 'bf16-true'",
    ),
    "clipping": (
        lambda rank: {"gradient_clip_val": 1.0 if rank else None},
        "the Trainer: rank 0 has gradient_clip_val=None, rank 1 has gradient_clip_val=1.0.",
    ),
    "window": (
        lambda rank: {"accumulate_grad_batches": 1 + rank},
        "the Trainer: rank 0 has accumulate_grad_batches=1, rank 1 has accumulate_grad_batches=2.",
    ),
    "callback": (
        lambda rank: {"callbacks": [MFUMonitor()] if rank else []},
        "the callback MFUMonitor: rank 0 has none, rank 1 has MFUMonitor, ",
    ),
    "schedule": (
        lambda rank: {"callbacks": [AccumulationScheduler({0: 1 + rank})]},
        "the callback AccumulationScheduler: rank 0 has schedule={0: 1}, rank 1 has schedule={0: 2}.",
    ),
    "strategy": (
        lambda rank: {"strategy": FSDP2Strategy(replicate_size=1 + rank)},
        "the strategy: rank 0 has replicate_size=1, rank 1 has replicate_size=2.",
    ),
    "learning rate": (
        lambda rank: {"module": Regression(partial(SGD, lr=0.1 + rank))},
        "the optimizer SGD: rank 0 has lr=0.1, rank 1 has lr=1.1.",
    ),
    "betas of a group": (
        lambda rank: {"module": Regression(lambda parameters: with_betas(parameters, 0.9 - rank * 0.1))},
        "the optimizer AdamW: rank 0 has betas=(0.9, 0.999) in group 1, rank 1 has betas=(0.8, 0.999) in group 1.",
    ),
    "batches": (
        lambda rank: {"data": regression_batches(2 + rank)},
        "the data: rank 0 has 2 batches in an epoch, rank 1 has 3 batches in an epoch.",
    ),
    "model": (
        lambda rank: {"strategy": FSDP2Strategy(), "module": frozen_on(rank)},
        "the model Regression: rank 0 has 4 trained of 4 tensors with 161 values",
    ),
}


def run(rank: int, module: Regression | None = None, data: Any = None, **arguments: Any) -> None:
    defaults: dict[str, Any] = {"plugin": AutocastPrecision("bf16-mixed"), "strategy": "ddp", "max_epochs": 1}
    fit(module or Regression(), data or regression_batches(2), devices=2, **(defaults | arguments))


def test_all_ranks_name_what_differs() -> None:
    def on_rank(rank: int) -> dict[str, str]:
        messages = {}
        for name, (given, _) in DIFFERENT.items():
            with pytest.raises(MisconfigurationException, match="Give all ranks the same arguments") as raised:
                run(rank, **given(rank))
            messages[name] = str(raised.value)
        run(rank, callbacks=[OverflowPostMortem(dirpath=Path(f"reports/{rank}"))])  # a path of its own
        run(rank, data=regression_batches(2 + rank), max_steps=2)  # ends before the ranks differ
        return messages

    first, second = run_ranks(on_rank, 2)
    assert first == second
    assert {name: f"Ranks differ in {text}" in first[name] for name, (_, text) in DIFFERENT.items()} == dict.fromkeys(
        DIFFERENT, True
    )


@on_ranks(run_ranks, 2)
def test_a_rank_that_takes_no_part_is_named(rank: int) -> None:
    rank_settings.WARN_AFTER = rank_settings.GIVE_UP_AFTER = datetime.timedelta(milliseconds=50)
    with process_group():
        if rank == 1:
            message = "Rank 1 waits for rank 0 to set up its run"
            with pytest.warns(UserWarning, match=message), pytest.raises(MisconfigurationException, match=message):
                exchanged({})


def read_slowly(rank: int) -> float:
    """When the last thing happened: rank 0 has returned, rank 1 is about to read."""
    times: list[float] = []

    def wait(*arguments: Any) -> None:
        original(*arguments)
        time.sleep(0.5)
        times.append(time.monotonic())

    original = rank_settings._wait
    with process_group(), pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(rank_settings, "_wait", wait)
        exchanged({})
        return times[0] if rank else time.monotonic()


def test_rank_0_whose_process_holds_the_store_waits_until_all_have_read() -> None:
    returned, read = run_ranks(read_slowly, 2)
    assert returned > read
