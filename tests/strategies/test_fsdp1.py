"""The plugin under ``strategy="fsdp"`` (FSDP1), whose own plugin goes wrong in many ways; two real processes."""

from typing import Any

import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import DDPStrategy
from small_models import Regression, adamw, fused_adamw, loader, quiet_trainer, regression_batches, sgd, weights
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor

BATCHES = {rank: regression_batches(12)[6 * rank : 6 * rank + 6] for rank in (0, 1)}


def fit(module: Any, strategy: str, batches: Any, init_scale: float = 1024.0, **arguments: Any) -> tuple[Any, ...]:
    kind = {"fsdp": CpuFsdp, "ddp": DDPStrategy}[strategy]
    monitor = OverflowMonitor()
    trainer = quiet_trainer(
        devices=2,
        strategy=kind(process_group_backend="gloo"),
        plugins=[AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=init_scale))],
        callbacks=[monitor],
        **arguments,
    )
    full: list[Tensor] = []

    def keep(*_: Any) -> None:
        with FullyShardedDataParallel.summon_full_params(trainer.strategy.model):
            full.extend(p.detach().clone() for p in module.parameters())

    module.on_train_end = keep
    trainer.fit(module, loader(batches))
    return full, monitor.skipped_steps, trainer.precision_plugin.scaler.get_scale(), monitor.grad_norm


CLIPS: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw, sgd])
@pytest.mark.full
def test_it_equals_ddp(optimizer: Any) -> None:
    """D04, D14, D17: our own scaler, any clipping, fused or not; an overflow on one rank skips on both."""

    def train(rank: int) -> Any:
        def one(strategy: str, clip: dict[str, Any]) -> Any:
            return fit(Regression(optimizer, overflows=[2] if rank == 1 else []), strategy, BATCHES[rank], **clip)

        return [(one("fsdp", clip), one("ddp", clip)) for clip in CLIPS.values()]

    ranks = run_ranks(train, 2)
    for number, clip in enumerate(CLIPS):
        expected, *decisions, norm = ranks[0][number][1]
        assert decisions == [1, 512.0]
        for (ours, *our_decisions, our_norm), _ in (found[number] for found in ranks):
            assert our_decisions == decisions, clip
            assert our_norm == pytest.approx(norm, rel=1e-3), clip
            for a, b in zip(ours, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=f"{clip}: {{}}".format)


def test_fused_optimizers_clip_true_gradients_by_value() -> None:
    """D16: the stock plugin limits gradients times the scale, silently, and nearly nothing is left of the step."""

    def fused_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2, fused=True)

    def single_precision(rank: int) -> list[Tensor]:
        module = Regression(fused_sgd)
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer = quiet_trainer(devices=2, strategy=strategy, **by_value)
        trainer.fit(module, loader(BATCHES[rank]))
        return weights(module)

    by_value = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    expected = run_ranks(single_precision, 2)[0]
    for ours, *_ in run_ranks(lambda rank: fit(Regression(fused_sgd), "fsdp", BATCHES[rank], **by_value), 2):
        for a, b, start in zip(ours, expected, weights(Regression()), strict=True):
            torch.testing.assert_close(a - start, b - start, rtol=1e-2, atol=1e-6)


class Linear(Regression):
    """The gradient is the batch itself."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        self.net = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.net.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).float().sum()


def test_gradients_are_reduced_in_fp32() -> None:
    """D18: the mean of 1 and 2^-12 has 13 significant bits, and fp16 has 11: stock FSDP's reduction makes 0.5 of it."""

    def train(rank: int) -> Any:
        return fit(Linear(), "fsdp", [torch.full((1, 2), [1.0, 2.0**-12][rank])], init_scale=1.0)[0]

    for (weight,) in run_ranks(train, 2):
        assert weight.tolist() == [[-(1.0 + 2.0**-12) / 2] * 2]
