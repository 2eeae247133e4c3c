"""One module, Trainer, plugin and strategy in run after run: evaluations in between change nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp2_runs import batches, fp16, fsdp2, full_weights
from gloo import FLOAT8
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from pipelined_models import PipelinedGPT
from small_models import loader, quiet_trainer

from lightning_mp import Float8Precision, LossScaler, MasterWeightsPrecision
from lightning_mp.language_model import LanguageModel
from lightning_mp.strategies import PipelineParallelStrategy

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

PLUGINS: dict[str, Callable[[], Precision]] = {
    "no plugin": Precision,
    "fp16": fp16,
    "remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
    "fp16 masters": lambda: MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=1024.0)),
    "fp8": lambda: Float8Precision(emulate=True, skip_small=False),
}


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(layers=1, heads=2, width=32, block_tokens=8, vocab=32, learning_rate=1e-2, warmup_steps=1)


#: Strategy and model.
STRATEGIES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "DDP": (lambda: DDPStrategy(process_group_backend="gloo"), language_model),
    "FSDP2": (fsdp2, language_model),
    "tensor parallel": (lambda: fsdp2(tensor_parallel_size=2), language_model),
    "pipeline": (lambda: PipelineParallelStrategy(microbatches=2), PipelinedGPT),
}


def after_runs(strategy: str, plugin: str, evaluates: bool) -> Any:
    """Two fits of two steps; with an evaluation before each, and one at the end."""
    make_strategy, make_module = STRATEGIES[strategy]
    module, data = make_module(), loader(batches(2))
    trainer = quiet_trainer(devices=2, strategy=make_strategy(), plugins=[PLUGINS[plugin]()], max_epochs=1)
    for epochs in (1, 2):
        if evaluates:
            trainer.validate(module, data, verbose=False)
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, data, data)
    weights = full_weights(module)
    if evaluates:
        trainer.validate(module, data, verbose=False)
    return trainer.global_step, weights


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fits_and_evaluations_follow_one_another(strategy: str) -> None:
    def run(rank: int) -> dict[str, Any]:
        return {plugin: [after_runs(strategy, plugin, evaluates) for evaluates in (False, True)] for plugin in PLUGINS}

    for plugin, (alone, evaluated) in run_ranks(run, 2, 300, imports=FLOAT8)[0].items():
        assert alone[0] == evaluated[0] == 4, plugin
        for name, value in alone[1].items():
            assert torch.equal(evaluated[1][name], value), (plugin, name)
