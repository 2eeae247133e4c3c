"""What is read off Trainers, data and schedulers before a fit is what the fit then has."""

import copyreg
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from preflight_projects import Net, Scheduled
from small_models import loader, quiet_trainer, regression_batches
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup

from lightning_mp import AccumulationScheduler, estimate_memory, preflight
from lightning_mp.monitors.preflight_checks.data_facts import FoundData, inspect_data
from lightning_mp.monitors.preflight_checks.trainer_facts import layers_in_eval, layers_of, run_of, untied_embeddings
from lightning_mp.training.lr_schedule.scheduler_facts import read_schedulers


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_epochs": 3},
        {"max_epochs": 3, "accumulate_grad_batches": 4},
        {"max_epochs": 3, "limit_train_batches": 5},
        {"max_epochs": 3, "limit_train_batches": 0.5},
        {"max_epochs": 3, "max_steps": 7},
        {"max_epochs": -1, "max_steps": 7},
        {"max_epochs": 3, "callbacks": [AccumulationScheduler({0: 1, 2: 4})]},
    ],
    ids=str,
)
def test_steps_of_the_run_are_those_that_it_makes(arguments: dict[str, Any]) -> None:
    trainer = quiet_trainer(**arguments)
    data = FoundData(None, None, 10)
    expected = run_of(trainer, Net(), data).steps
    trainer.fit(Net(), loader(regression_batches(10)))
    assert trainer.global_step == expected


def test_steps_that_are_not_known() -> None:
    data = FoundData(None, None, 10)
    assert run_of(quiet_trainer(max_epochs=-1), Net(), data).steps is None
    assert run_of(quiet_trainer(max_epochs=3), Net(), None).steps is None
    by_tokens = quiet_trainer(max_epochs=3, callbacks=[AccumulationScheduler({0: 2, 100: 4}, unit="token")])
    assert run_of(by_tokens, Net(), data).steps is None
    lightnings = quiet_trainer(max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 2, 1: 4})])
    assert run_of(lightnings, Net(), data).window_lengths == {2, 4}


def test_lightning_gives_each_rank_its_part_of_the_samples() -> None:
    data = DataLoader(TensorDataset(torch.zeros(10, 8)), batch_size=2)
    for shards, batches in ((True, 3), (False, 5)):
        assert inspect_data(data, Net(), data_ranks=2, shards_samples=shards).batches_per_epoch == batches


def test_several_loaders() -> None:
    loaders = {"a": loader(regression_batches(2)), "b": loader(regression_batches(5))}
    found = inspect_data(loaders, Net(), data_ranks=1, shards_samples=False)
    assert found.batches_per_epoch == 5
    assert torch.equal(found.batch["a"][0], regression_batches(1)[0][0])


@pytest.mark.parametrize(("find_unused", "needs_all"), [(False, True), (True, False)])
def test_ddp_waits_for_all_gradients_unless_it_is_told(find_unused: bool, needs_all: bool) -> None:
    trainer = quiet_trainer(strategy=DDPStrategy(find_unused_parameters=find_unused), devices=2)
    assert run_of(trainer, Net(), None).needs_all_gradients is needs_all
    assert run_of(trainer, Net(), None).data_ranks == 2


def test_schedulers_in_every_form_that_lightning_takes() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 90)
    config = {"scheduler": cosine, "interval": "step", "frequency": 2}
    forms: list[Any] = [
        *({"optimizer": optimizer, "lr_scheduler": config}, ([optimizer], [config])),
        *([{"optimizer": optimizer, "lr_scheduler": config}], ({"optimizer": optimizer, "lr_scheduler": config},)),
    ]
    for form in forms:
        [found] = read_schedulers(form)
        assert (found.planned, found.interval, found.frequency) == (90, "step", 2)
    for form in (
        optimizer,
        [optimizer],
        None,
        {"optimizer": optimizer},
        {"optimizer": optimizer, "lr_scheduler": None},
    ):
        assert read_schedulers(form) == ()


def test_lengths_of_schedulers_inside_of_others() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 90)]
    inner = lr_scheduler.SequentialLR(optimizer, parts, milestones=[10])
    outer = lr_scheduler.ChainedScheduler([inner, lr_scheduler.PolynomialLR(optimizer, 70)])
    found = read_schedulers({"lr_scheduler": outer})
    assert [(one.name, one.planned, one.after_its_end) for one in found] == [
        ("CosineAnnealingLR", 100, "rises"),
        ("PolynomialLR", 70, "zero"),
    ]
    [of_hugging_face] = read_schedulers({"lr_scheduler": get_cosine_schedule_with_warmup(optimizer, 5, 80)})
    assert (of_hugging_face.setting, of_hugging_face.planned) == ("num_training_steps", 80)
    [without_end] = read_schedulers({"lr_scheduler": lr_scheduler.CosineAnnealingLR(optimizer, math.inf)})
    assert without_end.planned == math.inf


def test_a_schedule_over_a_target_batch_is_made_although_its_length_is_not_known() -> None:
    def one_cycle(optimizer: Any, module: Any) -> Any:
        total = int(module.trainer.estimated_stepping_batches)  # an error for an infinite number
        return {"scheduler": lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=total), "interval": "step"}

    trainer = quiet_trainer(callbacks=[AccumulationScheduler(target_samples=16)], max_epochs=3)
    report = preflight(trainer, Scheduled(one_cycle), loader(regression_batches(12)))
    assert (report.findings, report.not_checked) == ((), ())


def test_layers_in_eval_mode_are_found_where_something_is_trained() -> None:
    backbone = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.1), nn.Sequential(nn.Dropout(0.1)))
    head = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(2))
    model = nn.ModuleDict(
        {"backbone": backbone.requires_grad_(False), "head": head, "rnn": nn.LSTM(2, 2, 2, dropout=0.1)}
    )
    assert layers_in_eval(model) == ()
    backbone.eval()
    assert layers_in_eval(model) == ()
    model.eval()
    assert layers_in_eval(model) == ("head.1", "head.3", "rnn")
    backbone[0].requires_grad_(True)
    assert layers_in_eval(model)[:2] == ("backbone.2", "backbone.3.0")


@pytest.mark.full
def test_sizes_of_gpt2_and_its_tied_embeddings() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    sizes = {layer.name: dict(layer.sizes) for layer in layers_of(model)}
    assert sizes["transformer.h.0.attn.c_attn"] == {"in_features": 16, "out_features": 48}
    assert sizes["lm_head"] == {"in_features": 16, "out_features": 50}
    assert untied_embeddings(model) == ()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert untied_embeddings(model) == ("input and output embeddings of GPT2LMHeadModel",)


class Augments(Net):
    """Draws from generators of its own, wherever they are."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.rng = torch.Generator().manual_seed(3)
        self.where, self.holder, self.held = where, SimpleNamespace(rng=self.rng), {"rng": [self.rng]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rng = {"attribute": self.rng, "object": self.holder.rng, "collection": self.held["rng"][0]}[self.where]
        noise = torch.randn(batch[0].shape, generator=rng, device=self.device)
        return super().training_step([batch[0] + noise, batch[1]], batch_idx)


@pytest.mark.parametrize("where", ["attribute", "object", "collection"])
def test_a_module_with_a_generator_is_checked_and_draws_nothing(where: str) -> None:
    module = Augments(where)
    before, table = module.rng.get_state(), dict(copyreg.dispatch_table)
    report = preflight(quiet_trainer(max_epochs=1), module, loader(regression_batches(2)))
    assert (report.findings, report.not_checked) == ((), ())
    assert torch.equal(module.rng.get_state(), before)
    assert copyreg.dispatch_table == table
    assert estimate_memory(module, regression_batches(1)[0]).peak_bytes > 0
