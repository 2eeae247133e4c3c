"""Running statistics and other buffers that training changes: as under DDP, alike on all ranks, exact on a resume."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fsdp2_runs import fsdp2
from gloo import process_group
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from small_models import ResumableLoader, loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from wire_counter import CollectiveCounter

from lightning_mp.ground.core.private_trainer_api import callbacks_of
from lightning_mp.pipelining.api import pipelined_loss
from lightning_mp.strategies.pipeline import PipelineParallelStrategy
from lightning_mp.training.checkpoints.consolidate import consolidate_checkpoint
from lightning_mp.training.distributed.buffer_broadcast import BufferBroadcast

WIDTH = 8
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


class Scaled(nn.Module):
    """Divides by a running size that the training forward reads, and replaces it by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.size = 0.9 * self.size + 0.1 * x.detach().abs().mean()
        return x / self.size


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scaled = Scaled()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.scaled(self.norm(self.up(x)).relu()))


class Normed(pl.LightningModule):
    """Notes its loss of the same validation batches on every rank, whose samples in training differ."""

    pipeline_layers: Any = ("blocks.*",)

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block(), block()])
        self.validated: list[float] = []

    def pipeline_loss(self, output: Tensor, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(output.float(), batch[1])

    def _loss(self, batch: list[Tensor]) -> Tensor:
        if isinstance(self.trainer.strategy, PipelineParallelStrategy):
            return pipelined_loss(self, batch)
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x.float(), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(float(self._loss(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Frozen(Normed):
    """The statistics of the first norm stay until the fifth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        norm = self.blocks[0].norm if hasattr(self.blocks[0], "norm") else None
        if norm is not None:
            norm.train(self.global_step >= 4)


class Plain(nn.Module):
    """A mask that is not saved, and no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x * self.mask)


class Constant(Plain):
    """One that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH))


def data(data_rank: int, count: int = 6, seed: int = 1) -> list[list[Tensor]]:
    x = torch.randn(count, 2, 4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return [[batch[data_rank] * (1 + data_rank), batch[data_rank].flip(1)] for batch in x]


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


class Watched(Callback):
    """Buffers and the broadcasts so far, after every batch, without Lightning's own of one flag about SIGTERM."""

    def __init__(self) -> None:
        self.buffers: list[dict[str, Tensor]] = []
        self.broadcasts: list[int] = []

    def on_train_start(self, *_: Any) -> None:
        self.counter = CollectiveCounter()
        self.counter.__enter__()

    def on_train_batch_end(self, trainer: Any, module: nn.Module, *_: Any) -> None:
        self.buffers.append(buffers_of(module))
        self.broadcasts.append(sum(seen.name == "broadcast" and seen.payload_bytes > 8 for seen in self.counter.seen))

    def on_train_end(self, *_: Any) -> None:
        self.counter.__exit__(None, None, None)


def pipeline() -> PipelineParallelStrategy:
    return PipelineParallelStrategy(stages=2, microbatches=2, process_group_backend="gloo")


STRATEGIES: dict[str, Any] = {
    "DDP": lambda: DDPStrategy(process_group_backend="gloo"),
    "folder": lambda: fsdp2("blocks.*"),
    "single file": lambda: fsdp2("blocks.*", save_distributed_checkpoint=False),
    "hybrid": lambda: fsdp2("blocks.*", replicate_size=2),
    "TP": lambda: fsdp2("blocks.*", tensor_parallel_size=2, tensor_parallel_plan={"*.down": "column_gather"}),
    "pipeline": pipeline,
}


def fit(
    rank: int,
    where: str,
    *,
    devices: int = 2,
    module: Normed | None = None,
    steps: int = 6,
    save: Path | None = None,
    resume: Path | None = None,
    callbacks: Sequence[Callback] = (),
    **arguments: Any,
) -> dict[str, Any]:
    module = Normed() if module is None else module
    watched = Watched()
    trainer = quiet_trainer(
        devices=devices,
        strategy=STRATEGIES[where](),
        callbacks=[watched, *callbacks],
        max_steps=steps,
        max_epochs=-1,
        num_sanity_val_steps=0,
        **arguments,
    )
    data_rank = {"hybrid": rank % 2, "TP": rank // 2, "pipeline": rank % 2}.get(where, rank)
    rows = ResumableLoader(data(data_rank))
    trainer.fit(module, rows, loader(data(0, 2, seed=2)), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    full = {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in module.named_parameters()}
    return {
        "weights": {name: value.clone() for name, value in full.items()},
        "buffers": buffers_of(module),
        "after": watched.buffers,
        "broadcasts": watched.broadcasts,
        "validated": module.validated,
    }


def assert_equal(ours: dict[str, Tensor], others: dict[str, Tensor], **tolerance: float) -> None:
    assert ours.keys() == others.keys()
    for name, value in others.items():
        torch.testing.assert_close(ours[name], value, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


def assert_alike(ranks: list[dict[str, Any]]) -> None:
    for other in ranks[1:]:
        assert other["validated"] == ranks[0]["validated"]
        for ours, theirs in zip(
            [*other["after"], other["buffers"]], [*ranks[0]["after"], ranks[0]["buffers"]], strict=True
        ):
            assert_equal(ours, theirs)


@pytest.mark.full
def test_fsdp2_has_the_statistics_of_ddp() -> None:
    """The running size is read by the training forward, so that ranks would train different functions."""

    def run(rank: int) -> list[dict[str, Any]]:
        return [fit(rank, where, val_check_interval=3) for where in ("DDP", "folder")]

    (reference, first), (_, second) = run_ranks(run, 2)
    assert_equal(first["buffers"], reference["buffers"], rtol=1e-5, atol=1e-6)
    assert_equal(first["weights"], reference["weights"], rtol=1e-5, atol=1e-6)
    assert first["validated"] == pytest.approx(reference["validated"], rel=1e-5)
    assert_alike([first, second])
    # One after each batch, and one for all buffers before the validation that follows the third.
    assert first["broadcasts"] == [1, 2, 3, 5, 6, 7]


def resumed(rank: int, where: str, folder: Path, devices: int = 2) -> list[dict[str, Any]]:
    """Without a stop and a checkpoint; then in two legs."""
    run = partial(fit, rank, where, devices=devices)
    path = folder / where.replace(" ", "")
    return [run(), run(steps=4, save=path), run(resume=path)]


@pytest.mark.full
def test_a_resumed_run_is_one_that_did_not_stop_from_folders_and_single_files(tmp_path: Path) -> None:
    def run(rank: int) -> list[list[dict[str, Any]]]:
        return [resumed(rank, where, tmp_path) for where in ("folder", "single file")]

    first, second = run_ranks(run, 2)
    for (whole, half, late), (whole_2, half_2, late_2) in zip(first, second, strict=True):
        assert_equal(late["buffers"], whole["buffers"])
        assert_equal(late["weights"], whole["weights"])
        for both in ((whole, whole_2), (half, half_2), (late, late_2)):
            assert_alike(list(both))
    consolidate_checkpoint(tmp_path / "folder", tmp_path / "whole.ckpt")
    saved = [torch.load(tmp_path / name)["state_dict"] for name in ("whole.ckpt", "singlefile")]
    for state, (_, half, _) in zip(saved, first, strict=True):
        assert_equal({name: state[name] for name in half["buffers"]}, half["buffers"])


@pytest.mark.full
def test_copies_of_a_pipeline_are_alike_and_resume_exactly(tmp_path: Path) -> None:
    ranks = run_ranks(partial(resumed, where="pipeline", folder=tmp_path, devices=4), 4)
    saved = torch.load(tmp_path / "pipeline")["state_dict"]
    for pair in (ranks[:2], ranks[2:]):  # the copies of one stage
        for leg in zip(*pair, strict=True):
            assert_alike(list(leg))
        whole, half, late = pair[0]
        assert_equal(late["buffers"], whole["buffers"])
        assert_equal(late["weights"], whole["weights"])
        assert half["buffers"]
        assert_equal({name: saved[name] for name in half["buffers"]}, half["buffers"])
    assert len({tuple(leg["validated"]) for rank in ranks for leg in rank[:1]}) == 1


@pytest.mark.full
@pytest.mark.parametrize("where", ["hybrid", "TP"])
def test_all_ranks_of_a_mesh_are_alike(where: str) -> None:
    assert_alike(run_ranks(partial(fit, where=where, devices=4, steps=3), 4))


class SavedInside(Callback):
    """A checkpoint after the fifth batch, and the buffers after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffers: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.path)
            self.buffers = buffers_of(module)


@pytest.mark.full
def test_statistics_that_begin_to_change_inside_an_epoch_are_noticed_before_they_are_read(tmp_path: Path) -> None:
    def run(rank: int) -> list[dict[str, Any]]:
        validated = fit(rank, "folder", module=Frozen(), steps=5, val_check_interval=5)
        saved = SavedInside(tmp_path / "late")
        return [validated, fit(rank, "folder", module=Frozen(), steps=6, callbacks=[saved]), {"buffers": saved.buffers}]

    first, second = run_ranks(run, 2)
    assert first[0]["validated"] == second[0]["validated"]
    for ours, theirs in zip(first, second, strict=True):
        assert_equal(ours["buffers"], theirs["buffers"])
    # Before the look that validation and checkpoint take, nobody knew.
    name = "blocks.0.norm.running_mean"
    for ours, theirs in zip(first[:2], second[:2], strict=True):
        assert ours["after"][3][name].count_nonzero() == 0
        assert not torch.equal(ours["after"][4][name], theirs["after"][4][name])


@pytest.mark.full
@pytest.mark.parametrize("where", ["folder", "pipeline"])
def test_models_without_such_buffers_pay_nothing(where: str) -> None:
    class Callbacks(Normed):
        def on_train_start(self) -> None:
            self.sends = any(isinstance(callback, BufferBroadcast) for callback in callbacks_of(self.trainer))

    def run(rank: int) -> list[Any]:
        modules = [Callbacks(Plain), Callbacks(Constant)]
        counts = [fit(rank, where, devices=devices, module=module)["broadcasts"] for module in modules]
        return [module.sends for module in modules], counts

    devices = 4 if where == "pipeline" else 2
    for sends, (plain, constant) in run_ranks(run, devices):
        assert sends == [False, True]
        assert [many - few for many, few in zip(constant, plain, strict=True)] == [1] * 6  # only after the first batch


@pytest.mark.full
def test_after_a_fit_that_failed_everything_is_taken_off_and_the_next_run_begins_alike() -> None:
    class Failing(Normed):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise RuntimeError("planted")
            return loss

    def run(rank: int) -> Any:
        module = Failing()
        trainer = quiet_trainer(devices=2, strategy=fsdp2("blocks.*"), num_sanity_val_steps=0)
        with pytest.raises(RuntimeError, match="planted"):
            trainer.fit(module, loader(data(rank)), loader(data(0, 2)))
        left = {"teardown", "lightning_module_state_dict"} & vars(trainer.strategy).keys()
        left |= {type(callback).__name__ for callback in callbacks_of(trainer)} & {"BufferBroadcast"}
        drifted = buffers_of(module)
        quiet_trainer(devices=2, strategy=fsdp2("blocks.*")).validate(module, loader(data(0, 2)), verbose=False)
        return left, drifted, module.validated, buffers_of(module)

    (left, drifted, validated, first), (_, other, validated_2, second) = run_ranks(run, 2)
    assert not left
    assert any(not torch.equal(drifted[name], other[name]) for name in drifted)
    assert validated == validated_2
    assert_equal(second, first)
    assert_equal(first, drifted)


def test_any_dtype_and_shape_is_sent_and_what_is_not_saved_is_left() -> None:
    def run(rank: int) -> dict[str, Any]:
        with process_group():
            module = nn.Module()
            values = torch.arange(6).view(2, 3) + 10 * rank
            for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64):
                module.register_buffer(
                    f"of_{dtype}".replace(".", "_"), (values % 2 if dtype == torch.bool else values).to(dtype)
                )
            module.register_buffer("scalar", torch.tensor(float(rank)))
            module.register_buffer("nan", torch.tensor([float("nan"), float(rank)]))
            module.register_buffer("empty", torch.zeros(0))
            module.register_buffer("turned", values.clone().t())
            module.register_buffer("column", values.float()[:, 1])
            module.register_buffer("expanded", torch.tensor(float(rank)).expand(3))
            module.register_buffer("conjugate", torch.tensor([1.0, rank + 1j]).conj())
            module.part = nn.Module()
            for owner in (module, module.part):
                owner.register_buffer("own", torch.tensor(rank), persistent=False)
            mesh = init_device_mesh("cpu", (2,))
            module.register_buffer("sharded", distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
            with torch.inference_mode():
                module.register_buffer("made_in_evaluation", torch.tensor(float(rank)))
            sending = BufferBroadcast(module, torch.device("cpu"), [mesh.get_group()])
            sending.flush_pending()
            sending.on_train_batch_end()
            sending.flush_pending()
            module.sharded = module.sharded.to_local()
            return buffers_of(module)

    first, second = run_ranks(run, 2)
    for name in ("own", "part.own"):
        assert (first.pop(name), second.pop(name)) == (0, 1)
    assert [first.pop("sharded").tolist(), second.pop("sharded").tolist()] == [[0, 1], [2, 3]]
    for name, value in first.items():
        assert second[name].dtype == value.dtype
        torch.testing.assert_close(second[name], value, rtol=0, atol=0, equal_nan=True)
    assert first["scalar"] == 0
    assert (second["column"].tolist(), second["expanded"].tolist()) == ([1, 4], [0, 0, 0])
    assert first["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
