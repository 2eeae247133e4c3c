"""Two changed lines in a Hydra project: what OmegaConf hands over is taken as it is."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import pytest
from omegaconf import DictConfig, OmegaConf
from small_models import TokenModel, loader, quiet_trainer, token_batches

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler, OverflowMonitor

CONFIG = """
precision: 16-mixed
scaler: {init_scale: 1024, growth_interval: 500}
windows: {early: 1, late: 3}
accumulation:
  unit: step
  schedule:
    "0": ${windows.early}
    "1_0": ${windows.late}
budget:
  tokens: 120
  landing: exact
trainer:
  max_epochs: -1
  gradient_clip_val: 1.0
"""


def config(*overrides: str) -> DictConfig:
    """What `@hydra.main` passes: the file, the overrides of the command line, and no new keys."""
    merged = OmegaConf.merge(OmegaConf.create(CONFIG), OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(merged, DictConfig)
    OmegaConf.set_struct(merged, True)
    OmegaConf.set_readonly(merged, True)
    return merged


def train(cfg: DictConfig) -> tuple[pl.Trainer, TokenModel, ChinchillaBudget]:
    module = TokenModel()
    budget = ChinchillaBudget(**cfg.budget)
    trainer = quiet_trainer(
        plugins=[AutocastPrecision(cfg.precision, scaler=LossScaler(**cfg.scaler))],
        callbacks=[AccumulationScheduler(**cfg.accumulation), OverflowMonitor(), budget],
        **cfg.trainer,
    )
    trainer.fit(module, loader(token_batches([8] * 5)))
    return trainer, module, budget


def test_a_hydra_project_follows_its_schedule_to_its_budget() -> None:
    cfg = config()
    before = deepcopy(cfg)
    trainer, module, budget = train(cfg)
    # 120 tokens are 15 micro-batches of 8: ten windows of one, then an epoch's five as three and the rest.
    assert module.trained_tokens == budget.tokens_seen == 120
    assert trainer.global_step == 10 + 2
    assert trainer.precision_plugin.scaler.rule.growth_interval == 500
    assert cfg == before


@pytest.mark.parametrize(
    "written",
    [{"0": 1, "1_000": 4}, {0: 1, 1000: 4}, {"0": "1", "1000": "4"}, {"1000": 4, "0": 1}],
    ids=["string keys", "integer keys", "string values", "any order"],
)
def test_a_dictconfig_is_a_schedule(written: dict[Any, Any]) -> None:
    node = OmegaConf.create({"schedule": written}).schedule
    assert isinstance(node, DictConfig)
    assert isinstance(node, Mapping)
    schedule = AccumulationScheduler(node, unit="step").schedule
    assert list(schedule.items()) == [(0, 1), (1000, 4)]
    assert type(schedule) is dict
    assert {type(number) for pair in schedule.items() for number in pair} == {int}
