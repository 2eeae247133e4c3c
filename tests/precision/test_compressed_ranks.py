"""Parameters that are split between steps on two real processes: to the bit what fp32 masters are there."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import on_ranks, run_group
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from master_loops import OPTIMIZERS, master_weights
from master_ranks import BATCHES, GatheredInFp32, Ranked, Sharded, Split, ddp, full, model_parallel
from small_models import fit, loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_mp import FSDP2Strategy
from lightning_mp.ground.core import private_module_api, private_sharding_api
from lightning_mp.training.precision.masters.compressed_weights import compressed_shards

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


def fsdp2(**settings: Any) -> FSDP2Strategy:
    return FSDP2Strategy(shard=["net.*", "more"], process_group_backend="gloo", **settings)


STRATEGIES: dict[str, Any] = {
    "ddp": (Ranked, ddp),
    "ddp, bucket views": (Ranked, partial(ddp, gradient_as_bucket_view=True)),
    "ddp, static graph": (Ranked, partial(ddp, static_graph=True)),  # in windows torch asserts, with any storage
    "ddp, unused parameters": (partial(Ranked, uses_all=False), partial(ddp, find_unused_parameters=True)),
    "fsdp2": (Ranked, fsdp2),
    "fully_shard": (Sharded, partial(model_parallel, Sharded)),
    "tensor parallel": (Split, partial(model_parallel, Split)),
}


def train(
    rank: int, name: str, storage: str, optimizer: Any = OPTIMIZERS["adamw_foreach"], epochs: int = 2, **settings: Any
) -> tuple[list[Tensor], set[str]]:
    """The weights afterwards, and the classes of parameters between steps."""
    make, strategy = STRATEGIES[name]
    seen: set[str] = set()
    module = make(optimizer)

    def on_train_batch_start(*_: Any) -> None:
        if module.global_step:
            seen.update(type(p).__name__ for p in module.parameters())

    def on_train_batch_end(*_: Any) -> None:
        if module.global_step == 2:  # touches, and writes to, one weight
            with torch.no_grad():
                module.more.weight.clamp_(-0.1, 0.1)

    module.on_train_batch_start, module.on_train_batch_end = on_train_batch_start, on_train_batch_end
    path, saves = settings.pop("ckpt_path", None), settings.pop("save_to", None)
    plugin = master_weights(storage=storage, weight_by=None)
    trainer = quiet_trainer(devices=2, strategy=strategy(), plugins=[plugin], max_epochs=epochs, **settings)
    trainer.fit(module, loader(BATCHES[0 if make is Split else rank]), ckpt_path=path)
    if saves is not None:
        trainer.save_checkpoint(saves)
    return full(module), seen


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}], ids=["", "window"])
@pytest.mark.parametrize("optimizer", [OPTIMIZERS["adamw_foreach"], OPTIMIZERS["adamw_fused"], OPTIMIZERS["joint"]])
@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_train_as_with_fp32_masters(name: str, optimizer: Any, settings: dict[str, Any]) -> None:
    if "static" in name:
        settings = {"gradient_clip_val": 0.1}
    runs = [run_ranks(lambda rank, s=s: train(rank, name, s, optimizer, **settings), 2) for s in ("fp32", "remainder")]
    for (expected, whole), (ours, split) in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, ours, strict=True))
        assert not {kind for kind in whole if kind.startswith("Split")}
        assert {kind for kind in split if kind.startswith("Split")}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor parallel"])
@pytest.mark.parametrize("storage", ["remainder", "24bit"])
def test_ranks_resume_exactly(storage: str, name: str, tmp_path: Path) -> None:
    path, adam = tmp_path / "x.ckpt", OPTIMIZERS["adam"]
    straight = run_ranks(lambda rank: train(rank, name, storage, adam), 2)
    run_ranks(lambda rank: train(rank, name, storage, adam, epochs=1, save_to=path), 2)
    resumed = run_ranks(lambda rank: train(rank, name, storage, adam, ckpt_path=path), 2)
    for (expected, _), (ours, _) in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, ours, strict=True))


def test_uneven_shards_hold_no_fp32_memory_between_steps() -> None:
    """33 rows on two ranks; FSDP2 gathers the copies."""

    class Uneven(Ranked):
        trains_its_own = False

        def __init__(self) -> None:
            super().__init__(OPTIMIZERS["adamw_foreach"])
            self.net = nn.Sequential(nn.Linear(8, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 1))
            self.bytes_seen: list[float] = []

        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.global_step:
                weight: Any = optimizer.param_groups[0]["params"][1]
                assert type(weight).__name__ == "SplitShard"
                part = private_module_api.part_of(weight)
                self.bytes_seen.append(part.untyped_storage().nbytes() / part.numel())

    def run(rank: int, storage: str) -> tuple[list[Tensor], list[float]]:
        module = Uneven()
        if storage == "fp32":
            module.on_before_zero_grad = lambda optimizer: None  # type: ignore[method-assign]
        fit(module, BATCHES[rank], devices=2, strategy=fsdp2(), plugin=master_weights(storage=storage))
        return full(module), module.bytes_seen

    expected, ours = (run_ranks(lambda rank, s=s: run(rank, s), 2) for s in ("fp32", "remainder"))
    assert all(torch.equal(a, b) for a, b in zip(expected[0][0], ours[0][0], strict=True))
    assert len(ours[0][1]) == 5
    assert max(ours[0][1]) < 0.1


@on_ranks(run_group, 2)
def test_where_torch_lacks_the_name_fsdp2_is_refused(rank: int) -> None:
    module = nn.Linear(4, 4)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    for group in private_sharding_api.sharding_groups(module):
        del group.fsdp_params[0]._sharded_param_data
    with (
        pytest.raises(MisconfigurationException, match="need an internal name of FSDP2 that torch .* does not"),
        compressed_shards(module, torch.bfloat16, "remainder", lambda: 0),
    ):
        pass


@on_ranks(run_group, 2)
def test_what_is_gathered_in_fp32_is_refused(rank: int) -> None:
    """Without ``param_dtype`` FSDP2 makes no copies."""
    strategy, plugin = model_parallel(GatheredInFp32), master_weights(storage="remainder")
    with pytest.raises(MisconfigurationException, match="gathers these weights in fp32.*param_dtype="):
        fit(GatheredInFp32(), BATCHES[rank], devices=2, strategy=strategy, plugin=plugin)


def test_collectives_of_a_process_group_on_a_bare_parameter() -> None:
    """``torch.distributed`` finds the numbers; the group's own method, in C++, is refused by torch."""

    class Averaged(Ranked):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                self.more.weight.add_(0.25 * self.global_rank)
                dist.broadcast(self.more.weight, 0)
            if self.global_step == 3:
                self.trainer.precision_plugin._compressed.begin_step([])
                with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                    dist.group.WORLD.broadcast([self.more.bias], dist.BroadcastOptions()).wait()

    def run(rank: int) -> list[Tensor]:
        module = Averaged()
        fit(module, BATCHES[rank], devices=2, strategy=ddp(), plugin=master_weights(storage="remainder"))
        return full(module)

    def plain(rank: int) -> list[Tensor]:
        module = Ranked()
        fit(module, BATCHES[rank], devices=2, strategy=ddp(), plugin=master_weights())
        return full(module)

    for ours, expected in zip(run_ranks(run, 2), run_ranks(plain, 2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
