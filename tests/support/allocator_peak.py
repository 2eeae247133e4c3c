"""The most that torch's own CPU allocator held during one step of a real run: every block it gave out, from before the
model was made, internal buffers of kernels included.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

_STEP = "the step that is measured"
_THREAD_SECONDS = 0.01


class MarkStep(pl.Callback):
    """Marks the beginning of one optimizer step, counted from 0, in the trace."""

    def __init__(self, step: int, window: int = 1) -> None:
        self.first_batch = step * window

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first_batch:
            mark_step()


def mark_step() -> None:
    """From here on the peak counts."""
    with torch.profiler.record_function(_STEP):
        pass


def peak_of_step(run: Callable[[], object]) -> int:
    """Bytes at the peak after :func:`mark_step`, of everything that ``run`` allocates, from the model on."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _freed_by_this_thread(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    begin = next(event["ts"] for event in events if event.get("name") == _STEP)
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    return _peak(((event["ts"], event["args"]["Bytes"], event["args"]["Addr"]) for event in memory), begin)


@contextmanager
def _freed_by_this_thread() -> Iterator[None]:
    """The profiler sees nothing of gloo's threads, so what they were the last to hold would never be freed.

    A collective operation therefore outlives the thread that has carried it out.
    """
    wait = torch.distributed.Work.wait

    def wait_for_its_thread(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        time.sleep(_THREAD_SECONDS)
        return result

    torch.distributed.Work.wait = wait_for_its_thread  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.distributed.Work.wait = wait  # type: ignore[method-assign]


def _peak(events: Iterable[tuple[float, int, int]], begin: float) -> int:
    live: dict[int, int] = {}
    now = most = 0
    for when, size, address in events:
        if size > 0:
            now += size - live.get(address, 0)  # the profiler loses events: this block was freed
            live[address] = size
        elif address in live:  # what was there before the trace does not count
            now -= live.pop(address)
        if when >= begin:
            most = max(most, now)
    return most
