"""Real processes for tests of what several ranks do together: forked, so that nothing is imported twice."""

import contextlib
import ctypes
import datetime
import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

__all__ = ["RankError", "process_group", "run_ranks"]

# After the first failure the other ranks have this long to fail by themselves, so that their view is reported too.
GRACE_SECONDS = 2.0

# What a hung rank gets to write down where it is.
STACK_SECONDS = 0.3

POLL_SECONDS = 0.005


class RankError(AssertionError):
    """A rank raised, hung or died. The text holds each such rank, the first to fail on top."""


def run_ranks(function: Callable[[int], Any], world_size: int, timeout_seconds: float = 60) -> list[Any]:
    """Calls ``function(rank)`` in ``world_size`` forked processes and returns what they return, in rank order.

    The children find the variables of a launched job, so a Lightning Trainer in them starts no processes of its own:
    ``Trainer(accelerator="cpu", devices=world_size, strategy="ddp")``. Without a Trainer, open a :func:`process_group`.
    They inherit everything, closures, random state and filters of warnings included; only the return value, which must
    be picklable, comes back. Whatever happens, no child outlives the call.

    Raises:
        RankError: if a rank raised (with its traceback), did not finish in time (with its stack), or died.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    port = _free_port()
    with contextlib.ExitStack() as stack:
        children: list[_Child] = []
        for rank in range(world_size):
            result_file = stack.enter_context(tempfile.TemporaryFile())
            stack_file = stack.enter_context(tempfile.TemporaryFile())
            pid = os.fork()
            if pid == 0:
                _run_child(function, rank, world_size, port, result_file, stack_file)
            child = _Child(rank, pid, result_file, stack_file)
            stack.callback(child.end)
            children.append(child)
        failed = _wait(children, timeout_seconds)
        reports = [child.failure() for child in failed]
        still_running = [child for child in children if child.exit_code is None]
        reports += [child.hang(timeout_seconds, after_failure=bool(failed)) for child in still_running]
        if reports:
            raise RankError("\n".join(reports))
        return [child.message()[1] for child in children]


@contextlib.contextmanager
def process_group(timeout_seconds: float = 60) -> Iterator[None]:
    """The default gloo process group, for functions that run without a Trainer."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class _Child:
    rank: int
    pid: int
    result_file: IO[bytes]
    stack_file: IO[bytes]
    exit_code: int | None = None  # None while it runs; negative if a signal ended it

    def has_finished(self) -> bool:
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code is not None

    def message(self) -> tuple[bool, Any]:
        """Whether it succeeded, and its result or its traceback."""
        self.result_file.seek(0)
        success, payload = pickle.load(self.result_file)
        return success, payload

    def failure(self) -> str:
        """Why it failed; empty if it did not."""
        assert self.exit_code is not None
        if self.exit_code < 0:
            return f"Rank {self.rank} was ended by {signal.Signals(-self.exit_code).name}."
        if self.exit_code > 0 or not os.fstat(self.result_file.fileno()).st_size:
            return f"Rank {self.rank} exited with code {self.exit_code} and no result."
        success, payload = self.message()
        return "" if success else f"Rank {self.rank} raised:\n{payload}"

    def hang(self, timeout_seconds: float, *, after_failure: bool) -> str:
        if after_failure:
            return f"Rank {self.rank} was still running and has been ended."
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        stack = os.pread(self.stack_file.fileno(), 1 << 20, 0).decode()
        return f"Rank {self.rank} did not finish within {timeout_seconds:g} seconds. It was here:\n{stack}"

    def end(self) -> None:
        if not self.has_finished():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _wait(children: list[_Child], timeout_seconds: float) -> list[_Child]:
    """Waits until all children have finished or time is up; returns who failed, the first on top."""
    deadline = time.monotonic() + timeout_seconds
    waiting, failed = list(children), []
    while waiting and time.monotonic() < deadline:
        for child in [child for child in waiting if child.has_finished()]:
            waiting.remove(child)
            if child.failure():
                failed.append(child)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)
    return failed


def _run_child(
    function: Callable[[int], Any],
    rank: int,
    world_size: int,
    port: int,
    result_file: IO[bytes],
    stack_file: IO[bytes],
) -> NoReturn:
    """Never returns: a forked child must not go on with the parent's test session."""
    exit_code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ended with the parent, however that ends
        faulthandler.register(signal.SIGUSR1, file=stack_file)
        _set_environment(rank, world_size, port)
        torch.set_num_threads(1)
        try:
            message = pickle.dumps((True, function(rank)))
        except BaseException:
            message = pickle.dumps((False, traceback.format_exc()))
        result_file.write(message)
        result_file.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        exit_code = 0
    finally:
        os._exit(exit_code)


def _set_environment(rank: int, world_size: int, port: int) -> None:
    # By these Lightning would take the machine for a cluster and look for ranks elsewhere.
    for name in ("KUBERNETES_PORT", "SLURM_NTASKS"):
        os.environ.pop(name, None)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    rank_zero_only.rank = rank  # read from the environment once, when lightning was imported


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
