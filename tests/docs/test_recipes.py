"""Every recipe does what the text at its top says: the same words, and numbers that bear out the claim."""

import ast
import contextlib
import functools
import io
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo import run_same_ranks as run_ranks

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
FILES = {
    path.stem if path.parent == RECIPES else path.parent.name: path
    for path in sorted([*RECIPES.glob("*.py"), *RECIPES.glob("*/train.py")])
}
# not the 16 of "16-mixed", "bfloat16"
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])")


def docstring(name):
    return ast.get_docstring(ast.parse(FILES[name].read_text()))


def shown(name):
    """The lines that the recipe says it prints."""
    block = re.search(r"^Expected output.*:\n\n((?:    .*\n?)+)", docstring(name), re.MULTILINE)[1]
    return [line.strip() for line in block.splitlines()]


def words(lines):
    return [NUMBER.sub("#", line) for line in lines]


def numbers(lines):
    return [float(number.replace(",", "")) for line in lines for number in NUMBER.findall(line)]


def start(name, arguments, capsys, monkeypatch):
    """What `python recipes/NAME.py` prints, from a process that has imported torch already."""
    monkeypatch.setattr(sys, "argv", [str(FILES[name]), *arguments])
    capsys.readouterr()
    with root_logger_kept():
        runpy.run_path(str(FILES[name]), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@contextlib.contextmanager
def root_logger_kept():
    """Hydra gives it handlers that write to this test's output and folder, where later tests would write too."""
    handlers, level = logging.root.handlers.copy(), logging.root.level
    try:
        yield
    finally:
        for handler in set(logging.root.handlers) - set(handlers):
            handler.close()
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


CLAIMS = {
    "fp16_t4": lambda accuracy, steps, scale, skipped: accuracy > 0.9 and scale == 2.0 ** (16 - skipped),
    "bf16_ampere": lambda tokens, budget, steps, loss, before: tokens == budget and loss < before - 1,
    "fp8_hopper": lambda in_fp8, layers, others, steps, fp8, bf16: (
        others == layers - in_fp8 == 2 and abs(fp8 - bf16) < 0.1 and bf16 < 4
    ),
    "lora": lambda base, base_bytes, adapters, adapter_bytes, before, after: (
        base_bytes == 2 * base and adapter_bytes == 16 * adapters and after < before - 0.3
    ),
    "gan": lambda before, now, generator, discriminator, scale: (
        now < before / 2 and min(generator, discriminator) >= 195 and scale <= 2**16
    ),
    "vit": lambda micro_batches, size, step, steps, epochs, saved, before, after: (
        micro_batches * size == step and steps == 10 and saved > 50 and before < 0.5 and after > 0.9
    ),
    "huggingface_causal": lambda parameters, tokens, steps, padded, first, last: tokens == 5_000 and last < first - 1,
    "muon_adamw": lambda matrices, others, loss, steps, before: (
        (matrices, others, steps) == (8, 7, 200) and loss < 2.7 < before
    ),
    "peft_lora": lambda base, base_bytes, adapters, start, end, before, after: (
        base_bytes == 2 * base and (start, end) == (0, 120) and after < 1 < before
    ),
    "static_loss_scale": lambda low, subnormal, suggested, scale, skipped, steps, first, last, high, ended_after: (
        subnormal > 1 and suggested == scale > low and skipped == 0 and last < first / 2 and ended_after >= 20
    ),
    "evaluation_and_inference": lambda trained, predicted, loss, same: (
        predicted == trained / 2 and loss < 0.5 and same > 99
    ),
    "lightning_cli": lambda scale, batches, first_epoch, second_epoch, first, last: (
        (scale, batches, first_epoch, second_epoch) == (1024, 32, 8, 4) and last < first
    ),
    "hydra_project": lambda scale, steps, first, last: (scale, steps) == (1024, 12) and last < first,
}
# peft 0.21 reads a name that transformers 5 has replaced.
OLD_NAME_IN_PEFT = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
CHEAP = ("evaluation_and_inference", "static_loss_scale")
NEEDED = {"hydra_project": ["hydra"], "peft_lora": ["peft"]}
ARGUMENTS = {"lightning_cli": ["fit", "--config", str(RECIPES / "lightning_cli" / "config.yaml")]}


@pytest.mark.parametrize("name", [n if n in CHEAP else pytest.param(n, marks=pytest.mark.full) for n in CLAIMS])
# Lightning 2.6 calls jsonargparse by names that jsonargparse has since replaced.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning", OLD_NAME_IN_PEFT)
def test_a_recipe_does_what_it_says(name, capsys, monkeypatch):
    for package in NEEDED.get(name, ()):
        pytest.importorskip(package)
    printed = start(name, ARGUMENTS.get(name, []), capsys, monkeypatch)
    last = printed[-len(shown(name)) :]
    assert words(last) == words(shown(name))
    assert CLAIMS[name](*numbers(last)), numbers(last)


@pytest.mark.full
@pytest.mark.filterwarnings(OLD_NAME_IN_PEFT, "ignore:Checkpoint directory .* exists and is not empty")
def test_a_killed_run_with_peft_resumes_and_its_folder_loads_in_transformers(tmp_path, capsys, monkeypatch):
    """A real SIGKILL, between two checkpoints: no checkpoint holds the base, and the last one is used."""
    pytest.importorskip("peft")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
    command = [sys.executable, str(FILES["peft_lora"]), "--kill-at", "50"]
    killed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    written = torch.load(tmp_path / "peft_run/checkpoints/last.ckpt", weights_only=True)
    assert written["global_step"] == 40
    assert len(written["state_dict"]) == 28  # two of each of the seven matrices of two layers
    assert all(".lora_" in name for name in written["state_dict"])

    printed = start("peft_lora", [], capsys, monkeypatch)
    assert words(printed[-4:]) == words(shown("peft_lora"))
    assert numbers(printed[-3:-2]) == [40, 120]
    assert printed[-1] == shown("peft_lora")[-1]
    assert (tmp_path / "peft_run/merged/model.safetensors").is_file()


def test_the_commands_of_the_hydra_recipe_are_what_hydra_reads():
    """Hydra's grammar has no quoted keys, so `schedule={"0": 1}` is an error on its command line."""
    hydra = pytest.importorskip("hydra")
    lines = [line.split() for line in docstring("hydra_project").splitlines() if line.startswith("    python train.py")]
    with hydra.initialize_config_dir(str(RECIPES / "hydra_project"), version_base=None):
        configs = [hydra.compose("config", overrides=line[2:]) for line in lines]
    assert [dict(config.accumulation.schedule) for config in configs] == [{"0": 2, "1": 4}, {"0": 1, "1": 4}]


@pytest.mark.full
def test_muon_trains_alike_on_two_ranks(capsys, monkeypatch):
    """A batch is divided among ranks; bf16 rounds sums in another order."""
    arguments = ["--steps", "20"]
    alone = start("muon_adamw", arguments, capsys, monkeypatch)

    def on_two_ranks(rank, strategy):
        sys.argv = [str(FILES["muon_adamw"]), "--strategy", strategy, "--devices", "2", *arguments]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(sys.argv[0], run_name="__main__")
        return printed.getvalue().splitlines()

    for strategy in ("ddp", "fsdp2"):
        first, of_rank_1 = run_ranks(functools.partial(on_two_ranks, strategy=strategy), 2)
        assert of_rank_1 == []
        assert words(first) == words(alone) == words(shown("muon_adamw"))
        assert numbers(first)[2] == pytest.approx(numbers(alone)[2], rel=5e-3)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_sharded_run_goes_on_with_another_number_of_ranks(tmp_path, capsys, monkeypatch):
    """2 ranks and then 1 end where 1 rank ends that was never stopped, but for rounding."""

    def on_two_ranks(rank):
        sys.argv = [str(FILES["fsdp2_resume"]), "--devices", "2"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(sys.argv[0], run_name="__main__")
        return printed.getvalue().splitlines()

    first, of_rank_1 = run_ranks(on_two_ranks, 2)
    assert (first[0], of_rank_1) == ("starts from scratch, world size 2", [])
    resumed = start("fsdp2_resume", [], capsys, monkeypatch)
    assert words(resumed) == words(shown("fsdp2_resume"))

    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    for _ in range(2):
        dist.destroy_process_group()
        alone = start("fsdp2_resume", [], capsys, monkeypatch)
    assert alone[0] == resumed[0] == "resumes from step=10.ckpt, world size 1"
    assert numbers(resumed[1:])[-1] == pytest.approx(numbers(alone[1:])[-1], rel=1e-3)


def test_every_recipe_has_its_claims_and_is_on_the_page():
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert {*CLAIMS, "fsdp2_resume"} == set(FILES)
    linked = {ROOT / "docs" / target for target in re.findall(r"\]\((\.\./recipes/[^)]+)\)", page)}
    assert {path.resolve() for path in linked if path.suffix == ".py"} == {path.resolve() for path in FILES.values()}
    for name, path in FILES.items():
        text = docstring(name)
        assert "\nWhen: " in text
        assert re.search(rf"^    python (?:{path.relative_to(ROOT)}|{path.name})", text, re.MULTILINE), name
