"""Ranks that report their progress to each other, so that one that hangs is named and all of them end."""

import contextlib
import datetime
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

#: What a process that the heartbeat ends returns to its launcher.
EXIT_CODE = 75

# Reports per time-out.
REPORTS = 10

# Who has not reported for half a time-out, but at least for so long, does not answer. The others wait for rank 0, which
# holds the reports, twice as long.
GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class RankReport:
    """How far one rank is."""

    rank: int  # its global rank
    host: str  # machine and process namespace, in which `pid` is valid
    pid: int  # its process
    # counts its reports; it stops changing if the process is stopped, dead, or cannot run Python threads
    sequence: int = 0
    beats: int = 0  # hooks of the Trainer it has passed
    place: str = "the start of training"  # the last of them, in words
    error: str = ""  # the exception it left training with; empty while it trains


def find_hung(before: Sequence[RankReport], after: Sequence[RankReport]) -> list[RankReport]:
    """Which ranks the others wait for, from two reports of each, when there is no progress.

    Those that do not answer; else those that left with an exception; else those that are the furthest behind. If all
    are at the same place, that is all of them.
    """
    silent = [new for old, new in zip(before, after, strict=True) if new.sequence == old.sequence and not new.error]
    left = [report for report in after if report.error]
    behind = min(report.beats for report in after)
    return silent or left or [report for report in after if report.beats == behind]


def describe(hung: Sequence[RankReport], before: Sequence[RankReport], timeout_seconds: float) -> str:
    """The message that names them."""
    num_ranks = len(before)
    sequences = {report.rank: report.sequence for report in before}
    parts = []
    for report in hung:
        if report.error:
            what = f"left training with {report.error}"
        elif report.sequence == sequences[report.rank]:
            what = "does not answer: it is stopped, dead, or holds Python's lock"
        else:
            what = "hangs"
        where = f"rank {report.rank} of {num_ranks} (process {report.pid} on {report.host.partition(' ')[0]})"
        parts.append(f"{where} {what}, last seen at {report.place}")
    together = " All ranks are at the same place; their stacks say more." if 1 < len(hung) == num_ranks else ""
    return (
        f"RankWatchdog: no progress for {timeout_seconds:g} seconds; {'; '.join(parts)}.{together} All ranks end now;"
        " start the run again from its latest checkpoint."
    )


def host_name() -> str:
    """The machine, and the namespace of its process ids where there are containers."""
    namespace = "/proc/self/ns/pid"
    return socket.gethostname() + (f" {os.readlink(namespace)}" if os.path.exists(namespace) else "")


class Heartbeat:
    """Two threads in each rank that report its progress, and end the process when there is no progress.

    The reports go through a separate ``TCPStore`` in the process of rank 0. Nothing else waits for them.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        timeout_seconds: float,
        *,
        host: str,
        broadcast: Callable[[int], int],
        barrier: Callable[[], object],
    ) -> None:
        self._rank, self._num_ranks, self._timeout = rank, num_ranks, timeout_seconds
        self._interval = timeout_seconds / REPORTS
        self._grace = max(timeout_seconds / 2, GRACE_SECONDS)
        self._report = RankReport(rank, host_name(), os.getpid())
        self._progress = (0, self._report.place, time.monotonic())
        limit = datetime.timedelta(seconds=max(timeout_seconds, 1))
        if rank == 0:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
            broadcast(self._store.port)
        else:
            self._store = dist.TCPStore(host, broadcast(0), is_master=False, timeout=limit)  # type: ignore[attr-defined]
        self._publish()
        barrier()
        self._known = self._all_reports()
        self._handles = self._open_handles()
        self._stopped = threading.Event()
        self._leaving = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name="RankWatchdog", daemon=True)
            for target in (self._exchange_heartbeats, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def beat(self, place: str) -> None:
        """Records that this rank has reached a place."""
        self._progress = (self._progress[0] + 1, place, time.monotonic())

    def stop(self, error: str = "") -> None:
        """Stops watching this rank, and notifies the others if training has not ended."""
        self._stopped.set()
        for thread in self._threads:
            # One may be blocked in the store of a dead rank 0 for long; it ends with the process.
            thread.join(min(self._interval, GRACE_SECONDS / 4))
        if error:
            self._report = replace(self._report, error=error)
            with contextlib.suppress(RuntimeError):
                self._publish()
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)

    # -- in the threads ------------------------------------------------------------------------------------------------

    def _exchange_heartbeats(self) -> None:
        """Reports and judges. It may be held up in the store if the process of rank 0 is stopped."""
        with contextlib.suppress(RuntimeError):
            while not self._stopped.wait(self._interval):
                self._publish()
                message = self._store.get("message").decode() if self._store.check(["message"]) else ""
                if not message and self._idle_seconds() >= self._timeout:
                    message = self._judge()
                if message:
                    self._leave(message)

    def _guard(self) -> None:
        """Ends this rank if the other thread could not."""
        while not self._stopped.wait(self._interval):
            if self._idle_seconds() >= self._timeout + 2 * self._grace:
                self._kill(self._known[:1])
                self._leave(describe(self._known[:1], self._known, self._timeout))

    def _judge(self) -> str:
        """Who hangs; empty if this rank continued in the meantime."""
        before = after = self._all_reports()
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and any(
            new.sequence == old.sequence and not new.error for old, new in zip(before, after, strict=True)
        ):
            time.sleep(self._interval)
            self._publish()
            after = self._all_reports()
        if self._idle_seconds() < self._timeout or self._stopped.is_set():
            return ""
        message = describe(find_hung(before, after), before, self._timeout)
        self._store.set("message", message)
        self._kill([new for old, new in zip(before, after, strict=True) if new.sequence == old.sequence])
        return message

    def _leave(self, message: str) -> None:
        if self._stopped.is_set() or not self._leaving.acquire(blocking=False):
            return
        # If the main thread never releases the GIL, this one never runs again; the timer does not need the GIL.
        with contextlib.suppress(Exception):  # a replaced stderr may have no file descriptor
            faulthandler.dump_traceback_later(8 * self._interval + 4 * GRACE_SECONDS, exit=True)
        named = f"rank {self._rank} of " in message
        if self._rank == 0 or named or "does not answer" in message:
            sys.stderr.write(f"[rank {self._rank}] {message}\n")
            sys.stderr.flush()
        if named:
            with contextlib.suppress(Exception):  # a replaced stderr may have no file descriptor
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        # The others read the message, last of all from rank 0, which holds it.
        time.sleep((4 if self._rank == 0 else 2) * self._interval)
        end_process()

    def _kill(self, silent: Sequence[RankReport]) -> None:
        """Ends processes on this machine that cannot end themselves; by handle, as a process id may be used again."""
        for report in silent:
            if report.rank in self._handles and not report.error:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handles[report.rank], signal.SIGKILL)

    # -- reports -------------------------------------------------------------------------------------------------------

    def _idle_seconds(self) -> float:
        return time.monotonic() - self._progress[2]

    def _publish(self) -> None:
        beats, place, _ = self._progress
        self._report = replace(self._report, sequence=self._report.sequence + 1, beats=beats, place=place)
        self._store.set(f"rank {self._rank}", json.dumps(asdict(self._report)))

    def _all_reports(self) -> list[RankReport]:
        texts = self._store.multi_get([f"rank {rank}" for rank in range(self._num_ranks)])
        return [RankReport(**json.loads(text)) for text in texts]

    def _open_handles(self) -> dict[int, int]:
        if not hasattr(os, "pidfd_open"):
            return {}
        neighbours = [r for r in self._known if r.host == self._report.host and r.rank != self._rank]
        return {report.rank: os.pidfd_open(report.pid) for report in neighbours}


def end_process() -> None:
    """Ends this process at once, with the workers of its data loaders; a hung main thread cannot be asked."""
    for worker in multiprocessing.active_children():
        worker.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)
