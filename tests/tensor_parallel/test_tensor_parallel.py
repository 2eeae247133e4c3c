"""Plugin and callbacks under tensor parallelism, plain parameters beside DTensors, two real processes."""

from typing import Any, ClassVar

import pytest
import torch
from gloo import on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from small_models import TokenModel, fused_adamw, loader, quiet_trainer, sgd, token_batches, weights
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler, OverflowMonitor

COUNTS = [6, 3, 11, 8, 2, 9, 7]


class Parallel(TokenModel):
    """The head is split by columns; the embedding stays a plain tensor on both ranks."""

    def configure_model(self) -> None:
        if not isinstance(self.head.weight, DTensor):
            plan = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(self.head, self.device_mesh["tensor_parallel"], plan)


def foreach_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def train(module: TokenModel, **arguments: Any) -> Any:
    monitor, budget = OverflowMonitor(), ChinchillaBudget(tokens=70)
    trainer = quiet_trainer(
        plugins=[AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))],
        callbacks=[monitor, budget, AccumulationScheduler({0: 2})],
        gradient_clip_val=0.05,
        max_epochs=-1,
        **arguments,
    )
    trainer.fit(module, loader(token_batches(COUNTS)))
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in weights(module)]
    return full, monitor.grad_norm, module.trained_tokens, budget.tokens_seen, trainer.global_step


def two_ranks() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")


@pytest.mark.parametrize("optimizer", [sgd, fused_adamw, foreach_adamw])
@pytest.mark.full
def test_it_equals_one_process_and_counts_shared_data_once(optimizer: Any) -> None:
    """D03, D20, D21: mixed tensor kinds, one norm, any kernel; both ranks see the same tokens."""

    def parallel(rank: int) -> Any:
        return train(Parallel(optimizer), devices=2, strategy=two_ranks())

    expected, norm, *totals = train(TokenModel(optimizer))
    assert totals[:2] == [70, 70]
    for ours, our_norm, *our_totals in run_ranks(parallel, 2):
        assert our_totals == totals
        assert our_norm == pytest.approx(norm, rel=1e-5)
        for a, b in zip(ours, expected, strict=True):
            # Adam divides small gradients by their own size, and their rounding with them.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 if optimizer is sgd else 1e-4)


@pytest.mark.full
def test_param_groups_and_scheduler_know_nothing_of_it() -> None:
    """D21: one group as the user made it, its learning rate scheduled, every parameter stepped each time."""

    class Scheduled(Parallel):
        groups_seen: ClassVar[list[int]] = []

        def configure_optimizers(self) -> Any:
            optimizer = fused_adamw(self.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, *_: Any) -> None:
            self.groups_seen.append(len(self.optimizers().param_groups))

    def parallel(rank: int) -> Any:
        module = Scheduled()
        trainer = quiet_trainer(devices=2, strategy=two_ranks(), plugins=[AutocastPrecision("bf16-mixed")])
        trainer.fit(module, loader(token_batches(COUNTS)))
        (group,) = trainer.optimizers[0].param_groups
        assert [id(p) for p in group["params"]] == [id(p) for p in module.parameters()]
        steps = [state["step"].item() for state in trainer.optimizers[0].state.values()]
        return group["lr"], steps, module.groups_seen

    for rate, steps, groups in run_ranks(parallel, 2):
        assert rate == 1e-2 * 0.5 ** len(COUNTS)
        assert steps == [len(COUNTS)] * 3
        assert groups == [1] * len(COUNTS)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
@on_ranks(run_ranks, 2)
def test_what_torch_has_no_sharded_kernel_for_is_refused_at_set_up(rank: int, optimizer: Any) -> None:
    """Torch says so at the first step only, from deep inside; if it ever learns it, the refusal can go."""
    module = Parallel(lambda parameters: optimizer(parameters, lr=1e-2, fused=True))
    trainer = quiet_trainer(devices=2, strategy=two_ranks(), plugins=[AutocastPrecision("bf16-mixed")])
    with pytest.raises(ValueError, match=r"has no fused \w+\. Use \w+\(foreach=True\)") as caught:
        trainer.fit(module, loader(token_batches(COUNTS)))
    assert str(caught.value).startswith(f"{optimizer.__name__}(fused=True) has sharded parameters (DTensors,")
    assert module.trained_tokens == 0
    stock = quiet_trainer(devices=2, strategy=two_ranks())
    sharded = Parallel(lambda parameters: optimizer([p for p in parameters if isinstance(p, DTensor)], fused=True))
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy registered"):
        stock.fit(sharded, loader(token_batches(COUNTS)))
