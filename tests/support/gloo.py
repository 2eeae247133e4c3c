"""Real processes for tests of what several ranks do together: forked from a server, so nothing is imported twice."""

import atexit
import contextlib
import datetime
import functools
import inspect
import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import cloudpickle
import torch
import torch.distributed as dist

# Ranks compute on the CPU, wherever they run; and the driver of a GPU does not survive a fork.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

FOLDER = Path(__file__).resolve().parent

# After the first failure the other ranks have this long to fail by themselves, so that their view is reported too.
GRACE_SECONDS = 2.0

# What a hung rank gets to write down where it is.
STACK_SECONDS = 0.3

#: What the first torch.compile of a process imports; it takes longer than to compile one of the models here.
COMPILER = (
    "functorch.compile",
    "networkx",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_aot",
    "torch._dynamo.testing",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.comm_lowering",
    "torch._inductor.debug",
    "torch._inductor.lowering",
    "torch.export._trace",
)

#: What torchao imports when a layer is first converted to fp8; it takes longer than a short training.
FLOAT8 = ("torch._inductor.codegen.triton",)


class RankError(AssertionError):
    """A rank raised, hung or died. The text holds each such rank, the first to fail on top."""


def run_ranks(
    function: Callable[[int], Any], world_size: int, timeout_seconds: float = 60, *, imports: Sequence[str] = ()
) -> list[Any]:
    """Calls ``function(rank)`` in ``world_size`` processes and returns what they return, in rank order.

    The processes find the variables of a launched job, so a Lightning Trainer in them starts no processes of its own:
    ``Trainer(accelerator="cpu", devices=world_size, strategy="ddp")``. Without a Trainer, open a :func:`process_group`.

    They are forks of a server that has computed nothing (``rank_server.py``). The function goes there by cloudpickle:
    with its closure, and with all that it uses of a test file, but without what the test changed in other modules.
    The folder, environment, import path, torch's random state and the filters of warnings go along; what it returns
    comes back. Whatever happens, no process outlives the call.

    The server imports the modules ``imports`` before it forks, once for all calls, instead of each rank for itself.

    Raises:
        RankError: if a rank raised (with its traceback), did not finish in time (with its stack), or died.
    """
    with _Call.open(world_size, imports) as call:
        return call.run(function, timeout_seconds, last=True)


def run_same_ranks(
    function: Callable[[int], Any], world_size: int, timeout_seconds: float = 60, *, imports: Sequence[str] = ()
) -> list[Any]:
    """:func:`run_ranks` in the processes of the last such call of this test file with as many ranks.

    What DTensor has found out about an operation is known to the process; to find it out takes longer than a short
    training. For functions that leave nothing behind in their process but a process group, which is destroyed. After
    an error the processes are ended.
    """
    file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    if _kept.file != file:
        _kept.end()
        _kept.file = file
    key = (world_size, tuple(imports))
    if key not in _kept.calls:
        _kept.calls[key] = _kept.stack.enter_context(_Call.open(world_size, imports))
    try:
        return _kept.calls[key].run(function, timeout_seconds)
    except BaseException:
        _kept.end()
        raise


def on_ranks(run: Callable[..., Any], world_size: int, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """A test that runs on so many ranks: its first argument is the rank, the others are those of any test.

    ``run`` is :func:`run_ranks`, :func:`run_same_ranks` or :func:`run_group`, with its ``options``.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all_ranks(**arguments: Any) -> None:
            run(functools.partial(test, **arguments), world_size, **options)

        signature = inspect.signature(test)
        on_all_ranks.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:]
        )
        return on_all_ranks

    return decorate


@contextlib.contextmanager
def process_group(timeout_seconds: float = 60) -> Iterator[None]:
    """The default gloo process group, for functions that run without a Trainer.

    The ranks leave it together: one that is done early would close its connections while another still makes them.
    The group itself stays, until the next function of the rank or the next group: a ``DistributedDataParallel`` that a
    local variable still holds must not outlive it (torch 2.13 then deadlocks: its destructor joins a thread of gloo
    while it holds Python's lock).
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
    yield
    dist.barrier()


def run_group(function: Callable[[int], Any], world_size: int) -> list[Any]:
    """:func:`run_same_ranks` for functions that run without a Trainer: inside of a :func:`process_group`."""

    def in_group(rank: int) -> Any:
        with process_group():
            return function(rank)

    return run_same_ranks(in_group, world_size)


@functools.cache
def _server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """In a session of its own: Ctrl-C is for the tests, which then close the connection."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = [sys.executable, str(FOLDER / "rank_server.py"), str(its.fileno()), json.dumps(sys.path)]
        process = subprocess.Popen(
            command, pass_fds=[its.fileno()], env=os.environ | NO_GPU, stdin=subprocess.DEVNULL, start_new_session=True
        )
    atexit.register(_end_server, process, ours)
    return process, ours


def _end_server(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    _kept.end()
    control.close()  # which ends it
    process.wait()


def _payload(function: Callable[[int], Any], world_size: int, port: int) -> bytes:
    """What the processes take over; the function last, since it can be read only where the modules are found."""
    for name, module in sys.modules.copy().items():
        # A test file is not imported again: that takes long, and would lose what pytest makes of its assertions.
        if name.startswith("test_") and FOLDER.parent in Path(getattr(module, "__file__", None) or ".").parents:
            cloudpickle.register_pickle_by_value(module)
    variables = {
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    settings = {
        "path": sys.path,
        "argv": sys.argv,
        "folder": os.getcwd(),
        "environment": dict(os.environ) | NO_GPU | variables,
        "function": cloudpickle.dumps((function, warnings.filters, torch.get_rng_state())),
    }
    return pickle.dumps(settings)


@dataclass
class _Child:
    rank: int
    control: socket.socket  # over which it is sent what to run
    result_file: IO[bytes]
    stack_file: IO[bytes]
    exit_code: int | None = None  # of its function or process, None while it runs; negative if a signal ended it
    gone: bool = False

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
        stack = os.pread(self.stack_file.fileno(), 1 << 20, 0).decode()
        return f"Rank {self.rank} did not finish within {timeout_seconds:g} seconds. It was here:\n{stack}"


@dataclass
class _Call:
    """A connection to the server, for as long as which the processes may live."""

    server: subprocess.Popen[bytes]
    connection: socket.socket
    children: list[_Child]

    @classmethod
    @contextlib.contextmanager
    def open(cls, world_size: int, imports: Sequence[str]) -> Iterator["_Call"]:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack, ours:
            children, controls = [], []
            for rank in range(world_size):
                control, its_control = (stack.enter_context(end) for end in socket.socketpair())
                children.append(
                    _Child(rank, control, *(stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)))
                )
                controls.append(its_control)
            with its:
                files = [its.fileno(), 1, 2]
                for child, its_control in zip(children, controls, strict=True):
                    files += [its_control.fileno(), child.result_file.fileno(), child.stack_file.fileno()]
                process, control = _server()
                if process.poll() is not None:  # a test may have ended it
                    control.close()
                    _server.cache_clear()
                    process, control = _server()
                socket.send_fds(control, [pickle.dumps(tuple(imports))], files)
            for its_control in controls:
                its_control.close()
            call = cls(process, ours, children)
            try:
                yield call
            finally:
                with contextlib.suppress(OSError, RuntimeError):  # without the server they are gone, too
                    ours.shutdown(socket.SHUT_WR)
                    while not all(child.gone for child in children):
                        call._hear()

    def run(self, function: Callable[[int], Any], timeout_seconds: float, *, last: bool = False) -> list[Any]:
        """What the function returns in each rank; after the last one a rank ends."""
        sys.stdout.flush()
        sys.stderr.flush()
        with _reserved_port() as port:
            payload = _payload(function, len(self.children), port)
            for child in self.children:
                child.exit_code = None
                child.result_file.truncate(0)
                with contextlib.suppress(OSError):  # it has died, which is reported below
                    child.control.sendall(payload)
                    if last:
                        child.control.shutdown(socket.SHUT_WR)
            failed = self.wait(timeout_seconds)
        reports = [child.failure() for child in failed]
        still_running = [child for child in self.children if child.exit_code is None]
        if still_running and not failed:
            self.write_stacks()
        reports += [child.hang(timeout_seconds, after_failure=bool(failed)) for child in still_running]
        if reports:
            raise RankError("\n".join(reports))
        return [child.message()[1] for child in self.children]

    def wait(self, timeout_seconds: float) -> list[_Child]:
        """Waits until all children have finished or time is up; returns who failed, the first on top.

        The time begins with the function: before, there is a server to be started and modules to be imported.
        """
        running, failed = len(self.children), []
        waited_for, deadline = set(range(running)), None
        while (
            running and select.select([self.connection], [], [], deadline and max(0.0, deadline - time.monotonic()))[0]
        ):
            rank, ended = self._hear()
            waited_for.discard(rank)
            running -= ended
            if ended and self.children[rank].failure():
                failed.append(self.children[rank])
                timeout_seconds = min(timeout_seconds, GRACE_SECONDS)
                deadline = min(deadline or math.inf, time.monotonic() + timeout_seconds)
            elif deadline is None and not waited_for:
                deadline = time.monotonic() + timeout_seconds
        return failed

    def write_stacks(self) -> None:
        self.connection.send(b"?")
        time.sleep(STACK_SECONDS)

    def _hear(self) -> tuple[int, bool]:
        """A rank of which there is news, and whether its function has ended."""
        message = self.connection.recv(1 << 12)
        if not message:
            raise RuntimeError(f"the server of the ranks has ended with {self.server.wait()}; see its standard error")
        rank, *exit_code = pickle.loads(message)
        child = self.children[rank]
        if not exit_code:
            return rank, False
        child.gone = exit_code[0] is not None
        ended = child.exit_code is None
        child.exit_code = exit_code[0] or 0 if ended else child.exit_code
        return rank, ended


@dataclass
class _Kept:
    """The processes of :func:`run_same_ranks`, by their number and what they have imported; of one test file."""

    file: str = ""
    calls: dict[tuple[int, tuple[str, ...]], _Call] = field(default_factory=dict)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def end(self) -> None:
        self.calls.clear()
        self.stack.close()


_kept = _Kept()


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else is given meanwhile, not even a test session beside this one.

    The socket is bound but does not listen, so with ``SO_REUSEADDR``, which torch's store sets too, rank 0 can.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
