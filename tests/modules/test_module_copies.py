"""Copies of a module that is being fitted, by pickle, deepcopy and torch.save: they work, and have no part in the run.

Spawned DataLoader workers get the module by pickle wherever the data holds one of its methods.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from small_models import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_mp as mp
from lightning_mp.ground.core.patches import Patch
from lightning_mp.pipelining import pipelined_loss

WIDTH, VOCABULARY = 16, 32


class Copied(pl.LightningModule):
    """A frozen and two trainable layers; it copies itself wherever a hook of it is called."""

    pipeline_layers = ("layers.*",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.LayerNorm(WIDTH), head
        )
        self.copies_made: list[str] = []

    def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.float().flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.check_copies(f"training_step {batch_idx}")
        if isinstance(self.trainer.strategy, mp.PipelineParallelStrategy):
            return pipelined_loss(self, batch)
        loss = self.pipeline_loss(self.layers(batch[0]), batch)
        self.log("loss", loss)
        return loss

    def on_fit_start(self) -> None:
        self.check_copies("on_fit_start")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.check_copies("on_before_optimizer_step")

    def on_train_epoch_end(self) -> None:
        self.check_copies("on_train_epoch_end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        if any(isinstance(callback, mp.TokenLearningRate) for callback in self.trainer.callbacks):
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        torch.manual_seed(1)
        return DataLoader(list(torch.randint(VOCABULARY, (8, 2, 6))), batch_size=2, collate_fn=self.collate)

    def collate(self, samples: list[Tensor]) -> list[Tensor]:
        return list(torch.stack(samples).unbind(1))

    def check_copies(self, where: str) -> None:
        if self._trainer is None:  # a copy
            return
        made, self.copies_made = self.copies_made, []
        for copied in copies(self):
            has_no_part_in_the_run(copied, self)
        self.copies_made = [*made, where]


def copies(module: nn.Module) -> Iterator[Any]:
    """By pickle, copy.deepcopy and torch.save."""
    pickled = pickle.dumps(module)
    assert b"lightning.pytorch.trainer" not in pickled
    yield pickle.loads(pickled)
    yield copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


def has_no_part_in_the_run(copied: nn.Module, module: nn.Module) -> None:
    for layer in copied.modules():
        if isinstance(layer, nn.Linear):  # an fp8 layer is none of torch's own
            assert type(layer) is nn.Linear
            assert vars(layer).keys() - vars(nn.Linear(1, 1)).keys() <= {"forward"}
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(copied.state_dict()[name], weight, rtol=0, atol=0)
    for name, value in vars(copied).items():
        if callable(value) and hasattr(type(copied), name):
            assert getattr(value, "__self__", None) is copied, f"{name} of the copy is {value}"


def everything() -> list[Any]:
    return [
        mp.AccumulationScheduler({0: 2}, carry_over=True),
        mp.ActivationCheckpointing(["layers.2"]),
        EMAWeightAveraging(),
        mp.GradientNoiseScale(),
        mp.OverflowMonitor(),
        mp.OverflowPostMortem(),
        mp.PrecisionAudit(),
        mp.StopAtBoundary(),
        mp.UnderflowMonitor(every_n_steps=1, watch=("gradients", "activations")),
    ]


STOCK = {"precision": "bf16-mixed"}
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "AutocastPrecision in bf16": lambda: {"plugins": [mp.AutocastPrecision("bf16-mixed")]},
    "AutocastPrecision in fp16": lambda: {"plugins": [mp.AutocastPrecision("16-mixed")]},
    "a policy": lambda: {
        "plugins": [mp.AutocastPrecision("bf16-mixed", policy={"layers.2": "fp32", "softmax": "fp32"})]
    },
    "masters": lambda: {"plugins": [mp.MasterWeightsPrecision("16-true")]},
    "masters in 16 bits": lambda: {"plugins": [mp.MasterWeightsPrecision("bf16-true", storage="remainder")]},
    "Float8Precision": lambda: {
        "plugins": [mp.Float8Precision(emulate=True, skip_small=False, skip_first_and_last=False)]
    },
    "OverflowMonitor on a stock plugin": lambda: STOCK | {"callbacks": [mp.OverflowMonitor()]},
    "UnderflowMonitor": lambda: STOCK | {"callbacks": [mp.UnderflowMonitor(every_n_steps=1, watch="activations")]},
    "PrecisionAudit": lambda: STOCK | {"callbacks": [mp.PrecisionAudit()]},
    "windows over epochs": lambda: STOCK | {"callbacks": [mp.AccumulationScheduler({0: 3}, carry_over=True)]},
    "held checkpoints": lambda: STOCK | {"callbacks": [mp.AccumulationScheduler({0: 3})], "enable_checkpointing": True},
    "MicroBatchOnOOM": lambda: STOCK | {"callbacks": [mp.MicroBatchOnOOM()]},
    "ChinchillaBudget": lambda: STOCK | {"callbacks": [mp.ChinchillaBudget(tokens=70)]},
    "MFUMonitor": lambda: STOCK | {"callbacks": [mp.MFUMonitor(peak_flops=1e12)]},
    "TokenLearningRate": lambda: STOCK | {"callbacks": [mp.TokenLearningRate(mp.WarmupCosine(), tokens=99)]},
    "RankWatchdog": lambda: STOCK | {"callbacks": [mp.RankWatchdog()]},
    "everything": lambda: {"plugins": [mp.AutocastPrecision("16-mixed")], "callbacks": everything()},
    "PipelineParallelStrategy": lambda: {"strategy": mp.PipelineParallelStrategy(), "precision": "32-true"},
    "ReducedPrecisionDDPStrategy": lambda: STOCK | {"strategy": mp.ReducedPrecisionDDPStrategy("bf16")},
}


@pytest.mark.quick_cases(6)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("part", PARTS)
def test_a_module_can_be_copied_wherever_in_a_fit(part):
    """E18."""
    module = Copied()
    quiet_trainer(**(PARTS[part]() | {"max_epochs": 2})).fit(module)
    steps = [f"training_step {i}" for i in range(4)]
    assert {"on_fit_start", *steps, "on_before_optimizer_step", "on_train_epoch_end"} <= {*module.copies_made}


def test_a_module_can_be_copied_in_a_step_that_is_replayed():
    """E18: with hooks on every layer."""
    module = Copied()
    plugin = mp.AutocastPrecision("16-mixed")
    ran = []

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        loss = Copied.training_step(module, batch, batch_idx) * torch.inf
        ran.append(batch_idx)
        return loss

    Patch(module, "training_step", training_step)
    post_mortem = mp.OverflowPostMortem(replay=True)
    quiet_trainer(plugins=[plugin], callbacks=[post_mortem], max_steps=-1, limit_train_batches=2).fit(module)
    assert post_mortem.reports
    assert ran.count(0) > 1  # the replay


@pytest.mark.parametrize("own_attribute", [False, True])
def test_a_copy_has_the_method_that_was_replaced(own_attribute):
    """E18: the class's method of the copy itself; or what somebody had set on the instance, twice replaced."""
    owner = Copied()
    if own_attribute:
        owner.collate = len
    first = Patch(owner, "collate", lambda *_: "first")
    second = Patch(owner, "collate", lambda *_: "second")
    for copied in copies(owner):
        assert copied.collate == (len if own_attribute else Copied.collate.__get__(copied))
    second.undo()
    first.undo()
    assert vars(owner).get("collate") == (len if own_attribute else None)


class Spawned(Copied):
    def train_dataloader(self) -> Any:
        dataset = super().train_dataloader().dataset
        return DataLoader(
            dataset, batch_size=2, num_workers=1, multiprocessing_context="spawn", collate_fn=self.collate
        )


PLUGINS: dict[str, Callable[[], Any]] = {
    "AutocastPrecision": lambda: mp.AutocastPrecision("16-mixed", scaler=mp.LossScaler(init_scale=256.0)),
    "Float8Precision": lambda: mp.Float8Precision(emulate=True, skip_small=False, skip_first_and_last=False),
    "fp32": lambda: mp.MasterWeightsPrecision("16-true", scaler=mp.LossScaler(init_scale=256.0)),
    "remainder": lambda: mp.MasterWeightsPrecision("bf16-true", storage="remainder"),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda plugin: pickle.loads(pickle.dumps(plugin)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


class Plain(pl.LightningModule):
    """It copies its plugin, in the middle of a fit, with whatever that holds."""

    def __init__(self, make_copy: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.make_copy = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), make_copy
        self.copies: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.copies.append(self.make_copy(self.trainer.precision_plugin))
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_can_be_copied_in_a_fit_and_the_copy_fits(name: str, how: str) -> None:
    ends, plugin = [], PLUGINS[name]()
    for _ in range(2):
        module = Plain(COPIES[how])
        quiet_trainer(plugins=[plugin]).fit(module, DataLoader([torch.ones(16)] * 3, batch_size=1))
        ends.append([p.detach().clone() for p in module.parameters()])
        plugin = module.copies[1]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_spawned_workers_load_data_that_holds_the_module():
    """E18: the default way to start workers on macOS and Windows. What is pickled for them is tested for each part."""
    module = Spawned()
    quiet_trainer(**PARTS["everything"]()).fit(module)
    assert "training_step 3" in module.copies_made
