"""The harness that other tests stand on: what comes back, what is reported, and that nobody is left behind."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from gloo import RankError, run_ranks, run_same_ranks


def is_alive(pid):
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def ends(pid):
    """Whether the process is gone or goes within a while."""
    give_up = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < give_up:
        time.sleep(0.02)
    return not is_alive(pid)


def write_pid(path):
    """In one piece, so that who waits for the file never reads half of it."""
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def test_an_exception_names_its_rank_and_line():
    def fail_on_one(rank):
        if rank == 1:
            raise ValueError("the reason")
        return rank

    with pytest.raises(RankError, match=r"(?s)^Rank 1 raised:.*in fail_on_one.*ValueError: the reason\n$"):
        run_ranks(fail_on_one, 2)


def test_a_hanging_rank_is_named_shown_and_ended(tmp_path):
    def hang_on_one(rank):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 1:
            time.sleep(600)

    with pytest.raises(RankError, match=r"(?s)^Rank 1 did not finish within 0.5 seconds.*in hang_on_one"):
        run_ranks(hang_on_one, 2, timeout_seconds=0.5)
    assert [is_alive(int((tmp_path / str(rank)).read_text())) for rank in range(2)] == [False, False]


def test_a_killed_rank_is_named_and_does_not_make_the_others_wait_for_the_time_out(tmp_path, monkeypatch):
    monkeypatch.setattr("gloo.GRACE_SECONDS", 0.2)

    def die_on_zero(rank):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(RankError, match=r"^Rank 0 was ended by SIGKILL\.\nRank 1 was still running and has been"):
        run_ranks(die_on_zero, 2)
    assert not is_alive(int((tmp_path / "1").read_text()))


def test_an_interrupted_parent_leaves_nobody_behind(tmp_path):
    """A time limit of the test session raises out of the wait; the children end with it."""

    parent = os.getpid()

    def interrupt_parent(rank):
        (tmp_path / "pid").write_text(str(os.getpid()))
        os.kill(parent, signal.SIGUSR2)
        time.sleep(600)

    def raise_interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, raise_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(interrupt_parent, 1)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_the_same_ranks_run_one_function_after_another(tmp_path, monkeypatch):
    def look_around(rank):
        torch.distributed.init_process_group("gloo")  # and leave it behind
        number = torch.tensor(rank)
        torch.distributed.all_reduce(number)
        return os.getpid(), os.getcwd(), os.environ["RANK"], number.item(), torch.rand(1).item()

    first = run_same_ranks(look_around, 2)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    second = run_same_ranks(look_around, 2)
    assert [found[0] for found in second] == [found[0] for found in first]
    assert [found[2:] for found in second] == [found[2:] for found in first]
    assert {found[1] for found in second} == {str(tmp_path / "other")}

    with pytest.raises(RankError, match=r"^Rank 1 exited with code 0 and no result"):
        run_same_ranks(lambda rank: os._exit(0) if rank else rank, 2)
    assert all(ends(found[0]) for found in first)
    assert run_same_ranks(lambda rank: rank, 2) == [0, 1]


@pytest.mark.full
def test_a_killed_server_takes_its_children_along_and_is_started_again(tmp_path):
    def kill_server(rank):
        write_pid(tmp_path / str(rank))
        while not (tmp_path / "0").exists() or not (tmp_path / "1").exists():
            time.sleep(0.02)
        if rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(RuntimeError, match=r"^the server of the ranks has ended with -9; see its standard error$"):
        run_ranks(kill_server, 2)
    assert all(ends(int((tmp_path / str(rank)).read_text())) for rank in range(2))
    assert run_ranks(lambda rank: rank, 2) == [0, 1]


FORKS = re.compile(
    r"""\bfork(pty)?\(|\bmultiprocessing\b(?!\.reductions)|["'](ddp_)?(fork|notebook(?!s\b))\w*["']|\bmp\.spawn\b"""
    r"""|\bnum_workers=(?!0\b)(?!.*\bmultiprocessing_context=["'](spawn|forkserver)["'])"""
)
# the server; scripts that are started as a user starts them, whose process has computed nothing before; and loaders
# whose workers draw random numbers and compute nothing else, as those of users do
MAY_FORK = {
    "exact_runs.py",
    "rank_server.py",
    "test_demo_launchers.py",
    "test_exact_resume.py",
    "test_gloo_harness.py",
    "test_strategy_launchers.py",
}


def test_nothing_here_forks_but_the_server_of_ranks():
    """After a backward on a CUDA build, or under a GPU's driver, a fork of the test process cannot compute."""
    root = Path(__file__).parents[2]
    files = [
        file
        for folder in ("tests", "notebooks", "scripts", "docs", ".ci")
        for file in sorted((root / folder).rglob("*"))
        if file.suffix in {"", ".ipynb", ".md", ".py", ".sh"}
        and file.is_file()
        and file.name not in {*MAY_FORK, ".metadata"}  # of a checkpoint
    ]
    assert len(files) > 150
    found = [
        f"{file.relative_to(root)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if FORKS.search(line)
    ]
    assert not found, "\n".join(["start ranks with gloo.run_ranks, anything else with subprocess:", *found])
