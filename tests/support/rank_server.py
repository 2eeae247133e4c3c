"""The process that ranks are forked from: it has imported what they need and computed nothing.

A fork of a process that has run a backward, compiled or touched CUDA takes autograd's threads and the driver's state
along in pieces. So ``gloo.py`` starts this file once for each test process and asks it for ranks over a socket.
"""

import ctypes
import faulthandler
import gc
import importlib
import importlib.metadata
import json
import logging
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import repeated_work

PRELOAD = (
    "cloudpickle",
    "lightning.pytorch",
    "lightning_mp",
    "omegaconf",  # Lightning imports it to write a checkpoint; that takes a fifth of a short run
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torchao.float8",
)

MAX_MESSAGE_BYTES = 1 << 12
MAX_FILES = 200


class _Call:
    """The ranks of one call. They end when the caller closes the connection.

    It is told of each of them that a function begins, ``(rank,)``, that it is done and another can be sent,
    ``(rank, None)``, and how the rank ended, ``(rank, exit_code)``.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.ranks: dict[int, int] = {}  # of those that still run, by process id

    def signal(self, number: int) -> None:
        for pid in self.ranks:
            os.kill(pid, number)

    def tell(self, *words: int | None) -> None:
        with suppress(OSError):  # the caller has gone: then nobody wants to know
            self.connection.send(pickle.dumps(words))


class RankServer:
    """Forks ranks for whoever holds the other end of ``control``, and ends them when it is closed."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._calls: set[_Call] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._accept)

    def serve(self) -> None:
        while self._control.fileno() >= 0:
            key, _ = self._selector.select()[0]
            key.data()
        for call in self._calls:
            call.signal(signal.SIGKILL)

    def _accept(self) -> None:
        message, files, *_ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, MAX_FILES, socket.MSG_CMSG_CLOEXEC)
        if not message:
            self._control.close()
            return
        call = _Call(socket.socket(fileno=files.pop(0)))
        self._calls.add(call)
        _import_all(pickle.loads(message))
        stdout, stderr, *of_ranks = files
        for rank, (control, result, stack) in enumerate(zip(*(of_ranks[i::3] for i in range(3)), strict=True)):
            pid = os.fork()
            if not pid:
                self._close_all_but(call)
                _be_rank(rank, call, socket.socket(fileno=control), stdout, stderr, result, stack)
            call.ranks[pid] = rank
            pidfd = os.pidfd_open(pid)
            self._selector.register(pidfd, selectors.EVENT_READ, partial(self._reap, call, pid, pidfd))
        for file in files:
            os.close(file)
        self._selector.register(call.connection, selectors.EVENT_READ, partial(self._hear, call))

    def _reap(self, call: _Call, pid: int, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        call.tell(call.ranks.pop(pid), os.waitstatus_to_exitcode(status))
        if not call.ranks:
            self._calls.remove(call)
            if call.connection in self._selector.get_map():
                self._selector.unregister(call.connection)
            call.connection.close()

    def _hear(self, call: _Call) -> None:
        try:
            wants_stacks = bool(call.connection.recv(1))
        except OSError:
            wants_stacks = False
        if wants_stacks:
            call.signal(signal.SIGUSR1)
        else:
            self._selector.unregister(call.connection)
            call.signal(signal.SIGKILL)

    def _close_all_but(self, own: _Call) -> None:
        """In a rank: a copy of a socket would keep the others from seeing that it was closed."""
        self._selector.close()
        self._control.close()
        for call in self._calls - {own}:
            call.connection.close()


def _be_rank(
    rank: int, call: _Call, control: socket.socket, stdout: int, stderr: int, result: int, stack: int
) -> NoReturn:
    """Runs functions until nobody can send another, and leaves; a rank must not go on as a server."""
    exit_code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ended with the server, however that ends
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdout.reconfigure(write_through=True)
        faulthandler.register(signal.SIGUSR1, file=stack)
        functions = control.makefile("rb")
        success = True
        while success and functions.peek(1):  # after an error the others should see that this rank is gone
            success, message = _result_of(rank, call, pickle.load(functions))
            with open(result, "wb", closefd=False) as file:
                file.seek(0)
                file.truncate()
                file.write(message)
            sys.stdout.flush()
            sys.stderr.flush()
            if success:
                call.tell(rank, None)
        exit_code = 0
    finally:
        os._exit(exit_code)


def _result_of(rank: int, call: _Call, settings: dict[str, Any]) -> tuple[bool, bytes]:
    """Whether the function succeeded; the same and what it returns, or its traceback, pickled."""
    import cloudpickle
    import torch.distributed as dist

    try:
        if dist.is_initialized():  # of the function before
            gc.collect()  # a DistributedDataParallel in a cycle must not outlive it
            dist.destroy_process_group()
        function = _take_over(rank, settings)
        call.tell(rank)
        return True, cloudpickle.dumps((True, function(rank)))
    except BaseException:
        return False, pickle.dumps((False, traceback.format_exc()))


def _take_over(rank: int, settings: dict[str, Any]) -> Callable[[int], Any]:
    """Makes this process look like the caller's, with the variables of a launched job; returns its function."""
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    sys.path[:] = settings["path"]
    sys.argv[:] = settings["argv"]
    os.chdir(settings["folder"])
    os.environ.clear()
    os.environ.update(settings["environment"])
    # By these Lightning would take the machine for a cluster and look for ranks elsewhere.
    for name in ("KUBERNETES_PORT", "SLURM_NTASKS"):
        os.environ.pop(name, None)
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    rank_zero_only.rank = rank  # read from the environment once, when lightning was imported
    torch.set_num_threads(1)
    function, filters, random_state = pickle.loads(settings["function"])
    torch.set_rng_state(random_state)
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line)
    return function


def _pattern(of_filter: Any) -> str:
    return getattr(of_filter, "pattern", of_filter) or ""


def _preload() -> None:
    repeated_work.read_entry_points_once()
    logging.getLogger().addHandler(logging.NullHandler())  # as under pytest: Lightning then adds none of its own
    _import_all(PRELOAD)


def _import_all(names: Sequence[str]) -> None:
    if sys.modules.keys() >= set(names):
        return
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    importlib.metadata.entry_points()
    repeated_work.seed_the_cpu_alone()
    gc.freeze()  # or each rank would look through all of this for garbage


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])
    _preload()
    RankServer(socket.socket(fileno=int(sys.argv[1]))).serve()
