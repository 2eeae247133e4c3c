"""docs/many_nodes.md: its table and sentences as the code prints them, its commands as two nodes on this machine."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from started_python import plain_environment

from lightning_mp.__main__ import main
from lightning_mp.planning.communication import ParallelLayout
from lightning_mp.planning.layouts import ParallelPlan, plan_parallelism
from lightning_mp.planning.memory.decoder_config import DecoderSize

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "many_nodes.md").read_text()
LLAMA_2_7B = DecoderSize.of(6_738_415_616, layers=32, width=4096, vocabulary=32000)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def plan(reduce: str = "fp32", **layout: int) -> ParallelPlan:
    arguments = {"tokens_per_step": 2**22, "context_tokens": 4096, "tensor_reduce_dtype": reduce}
    return plan_parallelism(LLAMA_2_7B, ParallelLayout(**layout), "DGX H100", **arguments)


def test_the_command_of_the_page_compares_every_layout(capsys):
    (command,) = (line for block in blocks("bash") for line in block.splitlines() if line.startswith("lightning-mp"))
    assert main(command.split()[1:]) == 0
    printed = capsys.readouterr().out
    layouts = [line.split("  ")[1] for line in printed.partition("layout  ")[2].splitlines()[1:13]]
    assert {"FSDP 64", "HSDP 8 x 8", "DDP 8 x PP 8", "FSDP 8 x TP 8", "DDP 64"} < set(layouts)


def test_the_rules_are_what_the_formulas_say():
    one_node, across = plan(shards=8), plan(shards=64)
    hybrid, largest = plan(copies=8, shards=8), plan(shards=1024)
    tensor = [plan(shards=gpus // 8, tensor=8) for gpus in (8, 64, 256, 1024)]
    megatron = plan("16bit", shards=8, tensor=8)
    short, middle, long = plan(copies=128, stages=8), plan(copies=8, stages=8), plan(stages=8)
    text = " ".join(PAGE.split())
    for sentence in (
        f"FSDP over its 8 GPUs sends for {one_node.wire_to_compute_ratio:.0%} of the computing time",
        f"FSDP over all of them sends {across.between_bytes / 1e9:.1f} GB to other nodes, `replicate_size=8`"
        f" {hybrid.between_bytes / 1e9:.1f} GB",
        f"both send the same, {largest.between_bytes / 1e9:.1f} GB, for {largest.wire_to_compute_ratio:.0%} of",
        *(f"waits for {each.awaited_seconds / each.compute_seconds:.0%} of the computing time" for each in tensor),
        f'Megatron-LM (`tensor_reduce_dtype="16bit"`), it is {megatron.awaited_seconds / megatron.compute_seconds:.0%}',
        f"Pipelines send least ({short.between_bytes / 1e9:.1f} GB at 1,024 GPUs)",
        f"the bubble is {long.bubble:.1%} with {long.micro_batches}, {middle.bubble:.1%} with {middle.micro_batches}"
        f" and {short.bubble:.1%} with {short.micro_batches}",
    ):
        assert sentence in text
    same = plan(copies=128, shards=8)
    assert same.between_bytes == pytest.approx(largest.between_bytes, rel=1e-3)
    assert all(short.between_bytes < other.between_bytes for other in (largest, same, plan(copies=1024), tensor[-1]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def small(command: str) -> str:
    """The command of the page for nodes with 2 processes."""
    assert command.count("8") in (1, 2)
    return command.replace("=8", "=2").replace("--devices 8", "--devices 2")


def environment(**more: str) -> dict[str, str]:
    """Of a login shell: nothing of a launcher that runs these tests; ``python`` is this one."""
    launchers = re.compile(r"SLURM_|RANK$|WORLD_SIZE$|MASTER_|TORCHELASTIC_")
    kept = {name: value for name, value in plain_environment().items() if not launchers.search(name)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1"} | more


def steps_of_checkpoints(folder: Path) -> set[int]:
    return {int(found[1]) for path in folder.glob("*.ckpt") if (found := re.search(r"step[=-](\d+)", path.name))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(blocks("python")[0])
    return tmp_path


@pytest.mark.full
@pytest.mark.timeout(300)
def test_torchrun_as_two_nodes(folder: Path) -> None:
    """Two torchruns that meet, with two processes each: the weights are sharded in a node and copied to the other."""
    command = small(next(block for block in blocks("bash") if block.startswith("torchrun")))
    command = command.replace("torchrun", f"{shlex.quote(sys.executable)} -m torch.distributed.run").replace(
        "29500", "$PORT"
    )
    shell = environment(HOST="localhost", PORT=str(free_port()))
    logs = [folder / f"node-{node}.txt" for node in (0, 1)]
    nodes = []
    for log in logs:
        with log.open("w") as output:
            nodes.append(subprocess.Popen(["sh", "-c", command], cwd=folder, env=shell, stdout=output, stderr=output))
    try:
        codes = [node.wait(timeout=240) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    text = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], text
    assert "step 8, 4 ranks on 2 nodes" in text
    assert "each over 2 ranks, in 2 copies" in text
    assert steps_of_checkpoints(folder / "checkpoints") == {8}


# Starts tasks as srun does, passes SIGTERM on to them, and returns the highest of their exit codes.
SRUN = """#!/usr/bin/env python3
import os, signal, subprocess, sys
command = [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=1"]
nodes, per_node = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = []
for task in range(nodes * per_node):
    places = {"PROCID": task, "NODEID": task // per_node, "LOCALID": task % per_node, "NTASKS": nodes * per_node}
    tasks.append(subprocess.Popen(command, env=os.environ | {f"SLURM_{k}": str(v) for k, v in places.items()}))
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
with open("srun.pid", "w") as file:
    file.write(str(os.getpid()))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = '#!/bin/sh\necho "$@" > scontrol.txt\n'


def start_batch(folder: Path, script: str, **more: str) -> tuple[subprocess.Popen[Any], Path]:
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", script, re.MULTILINE))
    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": directives["job-name"],
        "SLURM_NNODES": directives["nodes"],
        "SLURM_NTASKS_PER_NODE": directives["ntasks-per-node"],
        "SLURM_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    shell = environment(**variables | more)
    shell["PATH"] = f"{tools}{os.pathsep}{shell['PATH']}"
    log = folder / f"slurm-{time.monotonic_ns()}.txt"
    with log.open("w") as output:
        return subprocess.Popen(["bash", "-c", script], cwd=folder, env=shell, stdout=output, stderr=output), log


@pytest.mark.full
@pytest.mark.timeout(500)
def test_the_batch_script_is_stopped_queued_again_and_ends(folder: Path) -> None:
    """Two processes that take themselves for two nodes of SLURM; the time limit comes as SIGTERM to both of them."""
    script = next(block for block in blocks("bash") if block.startswith("#!/bin/bash"))
    assert "#SBATCH --signal=TERM@300\n" in script
    script = re.sub(r"(--ntasks-per-node=|--gpus-per-node=|--devices )8", r"\g<1>1", script)
    endless = script.replace("--devices 1", "--devices 1 --steps 1000000")
    job, log = start_batch(folder, endless)
    try:
        deadline = time.monotonic() + 200
        while not steps_of_checkpoints(folder / "checkpoints") and time.monotonic() < deadline:
            assert job.poll() is None, log.read_text()
            time.sleep(0.5)
        os.kill(int((folder / "srun.pid").read_text()), signal.SIGTERM)
        assert job.wait(timeout=120) == 75, log.read_text()
    finally:
        job.kill()
    assert (folder / "scontrol.txt").read_text() == "requeue 4711\n"
    assert "StopAtBoundary: stopped by SIGTERM after optimizer step" in log.read_text()
    stopped_at = max(steps_of_checkpoints(folder / "checkpoints"))
    assert list((folder / "checkpoints").glob(f"stopped-step-{stopped_at}.ckpt"))

    (folder / "scontrol.txt").unlink()
    last = stopped_at + 5
    job, log = start_batch(folder, script.replace("--devices 1", f"--devices 1 --steps {last}"))
    try:
        assert job.wait(timeout=200) == 0, log.read_text()
    finally:
        job.kill()
    assert f"step {last}, 2 ranks on 2 nodes" in log.read_text()
    assert not (folder / "scontrol.txt").exists()
