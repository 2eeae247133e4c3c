"""A run that goes on in another precision: nothing is lost, or it is said what is."""

import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core import rank_zero
from small_models import Trained, fit, loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mp import AutocastPrecision, Float8Precision, FSDP2Strategy, MasterWeightsPrecision
from lightning_mp.checkpoints import consolidate_checkpoint

PRECISIONS: dict[str, Callable[[], list[Any]]] = {
    "stock-32": list,
    "stock-mixed": lambda: [MixedPrecision("bf16-mixed", "cpu")],
    "stock-true": lambda: [HalfPrecision("bf16-true")],
    "autocast": lambda: [AutocastPrecision("bf16-mixed")],
    "masters": lambda: [MasterWeightsPrecision("bf16-true")],
    "no policy": lambda: [MasterWeightsPrecision("bf16-true", policy=None)],
    "fp8": lambda: [Float8Precision("rowwise", skip_small=False, emulate=True, skip_first_and_last=False)],
}
STOCK = ("stock-32", "stock-mixed", "stock-true")
WRITTEN = Path(__file__).parents[1] / "checkpoints" / "written_by_3279c5e"


def make_net() -> Trained:
    return Trained(
        lambda module, batch: module.net(batch).float().square().mean(),
        partial(torch.optim.AdamW, lr=1e-3),
        net=lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)),
    )


class AtStart(pl.Callback):
    """Weights and moments when training begins."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = weights(pl_module)
        self.moments = moments(trainer)


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().float().clone() for p in module.parameters()]


def moments(trainer: pl.Trainer) -> list[Tensor]:
    state = trainer.optimizers[0].state_dict()["state"]
    return [state[i]["exp_avg"].float().clone() for i in sorted(state)]


def leg(plugins: list[Any], epochs: int, path: Path, *, resume: bool) -> tuple[AtStart, pl.Trainer]:
    """One more epoch of two steps; the checkpoint is read from the path and written to it."""
    start = AtStart()
    trainer = quiet_trainer(plugins=plugins, max_epochs=epochs, callbacks=[start])
    batches = list(torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1)))
    trainer.fit(make_net(), loader(batches), ckpt_path=path if resume else None)
    trainer.save_checkpoint(path)
    return start, trainer


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("before", "after"), [(a, b) for a in PRECISIONS for b in PRECISIONS if not {a, b} <= set(STOCK)]
)
def test_every_precision_goes_on_from_every_other(before: str, after: str, tmp_path: Path) -> None:
    _, first = leg(PRECISIONS[before](), 1, tmp_path / "run.ckpt", resume=False)
    trained, moved = weights(first.lightning_module), moments(first)
    start, _ = leg(PRECISIONS[after](), 2, tmp_path / "run.ckpt", resume=True)
    if after == "stock-true":
        trained, moved = ([t.bfloat16().float() for t in tensors] for tensors in (trained, moved))
    assert same(start.weights, trained)
    assert same(start.moments, moved)


@pytest.mark.parametrize("precision", ["masters", "no policy"])
def test_a_checkpoint_holds_fp32_weights_and_nothing_beside_them(precision: str, tmp_path: Path) -> None:
    leg(PRECISIONS[precision](), 1, tmp_path / "run.ckpt", resume=False)
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert {value.dtype for value in checkpoint["state_dict"].values()} == {torch.float32}
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer_state(checkpoint).values())
    assert "lightning_mp_masters" not in checkpoint


def former_net() -> Trained:
    """The model that wrote them: three steps of AdamW under MasterWeightsPrecision("bf16-true") at 3279c5e."""
    return Trained(
        lambda module, batch: module.net(batch).square().mean(),
        partial(torch.optim.AdamW, lr=1e-2),
        net=lambda: nn.Linear(4, 2),
    )


def optimizer_state(checkpoint: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return checkpoint["optimizer_states"][0]["state"]


def former_masters(source: str = "single_file") -> list[Tensor]:
    path = WRITTEN / f"{source}.ckpt"
    if path.is_dir():
        whole = Path("whole.ckpt")
        if not whole.exists():
            consolidate_checkpoint(path, whole)
        path = whole
    checkpoint = torch.load(path, weights_only=True)
    rounded = checkpoint["state_dict"]["net.weight"]
    masters = [state["master_param"] for state in optimizer_state(checkpoint).values()]
    assert rounded.dtype == torch.bfloat16
    assert not torch.equal(masters[0], rounded.float())  # there is something to lose
    return masters


def resume_former(path: Path, **settings: Any) -> tuple[list[Tensor], list[str]]:
    """The weights when training goes on, whole, and what is said of masters."""
    start, lines = AtStart(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = rank_zero.log  # that of the Lightning imported last
    logger.addHandler(handler)
    trainer = fit(former_net(), list(torch.ones(3, 4, 4)), start, ckpt_path=path, max_epochs=2, **settings)
    logger.removeHandler(handler)
    if isinstance(trainer.strategy, CpuFsdp):  # shards that are flat
        return [], lines
    saved = path.parent / "again.ckpt"
    trainer.save_checkpoint(saved, weights_only=False)
    if saved.is_file():
        assert all("master_param" not in state for state in optimizer_state(torch.load(saved)).values())
    whole = [w.full_tensor() if isinstance(w, DTensor) else w for w in start.weights]
    return whole, [line for line in lines if "fp32 masters" in line]


@pytest.mark.parametrize("precision", ["masters", "autocast"])
def test_former_masters_become_the_weights_with_one_line(precision: str, tmp_path: Path) -> None:
    path = shutil.copy(WRITTEN / "single_file.ckpt", tmp_path)
    found, said = resume_former(Path(path), plugins=PRECISIONS[precision]())
    assert same(found, former_masters())
    assert len(said) == 1
    assert "fp32 masters of 2 of them: the masters become the weights" in said[0]


def test_former_masters_that_another_run_carried_along_are_ignored(tmp_path: Path) -> None:
    checkpoint = torch.load(WRITTEN / "single_file.ckpt", weights_only=True)
    del checkpoint["lightning_mp_masters"]  # Lightning's own plugins know nothing of it
    torch.save(checkpoint, tmp_path / "carried.ckpt")
    with pytest.warns(UserWarning, match="fp32 masters of 2 parameters in this checkpoint are ignored"):
        found, _ = resume_former(tmp_path / "carried.ckpt", plugins=PRECISIONS["masters"]())
    assert same(found, [value.float() for value in checkpoint["state_dict"].values()])


def _on_ranks(rank: int, strategy: str, path: Path) -> tuple[list[Tensor], list[str]]:
    made: Any = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp2": lambda: FSDP2Strategy(shard="net", process_group_backend="gloo"),
        "fsdp1": lambda: CpuFsdp(use_orig_params=True),
    }[strategy]()
    return resume_former(path, plugins=PRECISIONS["masters"](), strategy=made, devices=2)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:`_get_pg_default_device` will be deprecated")
@pytest.mark.parametrize(
    ("strategy", "source"), [("ddp", "single_file"), ("fsdp2", "single_file"), ("fsdp2", "shards")]
)
def test_former_masters_become_the_weights_on_any_ranks(strategy: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / f"{source}.ckpt"
    (shutil.copytree if source == "shards" else shutil.copy)(WRITTEN / f"{source}.ckpt", path)
    results = run_ranks(partial(_on_ranks, strategy=strategy, path=path), 2)
    for found, _ in results:
        assert same(found, former_masters(source))
    assert len(results[0][1]) == 1


def _warned_under_fsdp1(rank: int, path: Path) -> None:
    said = pytest.warns(UserWarning, match="continues from weights rounded to 16 bit: the fp32 masters")
    with said if rank == 0 else nullcontext():
        _on_ranks(rank, "fsdp1", path)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:`_get_pg_default_device` will be deprecated")
def test_what_fsdp1_does_not_read_of_former_masters_is_said(tmp_path: Path) -> None:
    path = Path(shutil.copy(WRITTEN / "single_file.ckpt", tmp_path))
    run_ranks(partial(_warned_under_fsdp1, path=path), 2)
