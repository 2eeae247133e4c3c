"""The harness that other tests stand on: what comes back, what is reported, and that nobody is left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo import RankError, process_group, run_ranks
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.environments import LightningEnvironment


def is_alive(pid):
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def write_pid(path):
    """In one piece, so that who waits for the file never reads half of it."""
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def test_ranks_compute_together_and_return_in_order():
    offset = 10  # a closure, which no other way of starting processes would carry

    def add_up(rank):
        with process_group():
            value = torch.tensor(float(rank + offset))
            dist.all_reduce(value)
            return rank, value.item(), torch.get_num_threads(), torch.arange(100_000)

    results = run_ranks(add_up, 3)
    assert [result[:3] for result in results] == [(0, 33.0, 1), (1, 33.0, 1), (2, 33.0, 1)]
    assert all(torch.equal(result[3], torch.arange(100_000)) for result in results)


def test_ranks_leave_their_process_group_together(tmp_path):
    """Who has nothing to do waits for who has, instead of closing the connections."""

    def work_on_zero(rank):
        with process_group():
            if rank == 0:
                time.sleep(0.3)
                (tmp_path / "done").touch()
        return (tmp_path / "done").exists()

    assert run_ranks(work_on_zero, 2) == [True, True]


def test_lightning_takes_the_ranks_for_launched_ones():
    def look_around(rank):
        environment = LightningEnvironment()
        return (
            environment.creates_processes_externally,
            environment.local_rank(),
            environment.node_rank(),
            environment.main_address,
            environment.main_port,
            rank_zero_only.rank,
        )

    first, second = run_ranks(look_around, 2)
    assert first == (True, 0, 0, "127.0.0.1", first[4], 0)
    assert second == (True, 1, 0, "127.0.0.1", first[4], 1)
    assert "LOCAL_RANK" not in os.environ


def test_an_exception_names_its_rank_and_line():
    def fail_on_one(rank):
        if rank == 1:
            raise ValueError("the reason")
        return rank

    with pytest.raises(RankError, match=r"(?s)^Rank 1 raised:.*in fail_on_one.*ValueError: the reason\n$"):
        run_ranks(fail_on_one, 2)


def test_a_failed_assertion_is_reported_like_any_exception():
    def fail(rank):
        assert rank == 5, "not five"

    with pytest.raises(RankError, match=r"(?s)AssertionError: not five.*AssertionError: not five"):
        run_ranks(fail, 2)


def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(RankError, match=r"(?s)Rank 0 raised:.*pickle"):
        run_ranks(lambda rank: lambda: rank, 1)


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


def test_a_rank_that_exits_without_a_result_is_reported():
    with pytest.raises(RankError, match=r"^Rank 0 exited with code 3 and no result\.$"):
        run_ranks(lambda _: os._exit(3), 1)


def test_an_interrupted_parent_leaves_nobody_behind(tmp_path):
    """A time limit of the test session raises out of the wait; the children end with it."""

    def interrupt_parent(rank):
        (tmp_path / "pid").write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGUSR2)
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


@pytest.mark.skipif("sys.platform != 'linux'", reason="children are tied to their parent on Linux only")
def test_a_killed_parent_takes_its_children_along(tmp_path):
    def last_child(rank):
        write_pid(tmp_path / "child")
        time.sleep(600)

    def parent_and_its_murderer(rank):
        if rank == 0:
            write_pid(tmp_path / "parent")
            run_ranks(last_child, 1)
        while not (tmp_path / "child").exists():
            time.sleep(0.02)
        os.kill(int((tmp_path / "parent").read_text()), signal.SIGKILL)

    with pytest.raises(RankError, match="Rank 0 was ended by SIGKILL"):
        run_ranks(parent_and_its_murderer, 2)
    child = int((tmp_path / "child").read_text())
    give_up = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not is_alive(child)
