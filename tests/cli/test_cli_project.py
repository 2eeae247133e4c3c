"""Two changed entries in a LightningCLI project: plugin and callbacks come out of YAML as they were written there."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from small_models import TokenModel, loader, weights
from torch import Tensor

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler, OverflowMonitor

# LightningCLI 2.6 calls what jsonargparse has given other names since (lightning/pytorch/cli.py); it still works.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:[\s\S]*was deprecated in v4\.49\.0 and will be removed in v5:DeprecationWarning",
    r"ignore:\s*By default only one JsonargparseDeprecationWarning per type is shown:DeprecationWarning",
)

CONFIG = """
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: -1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  plugins:
    - class_path: lightning_mp.AutocastPrecision
      init_args:
        precision: 16-mixed
        scaler:
          class_path: lightning_mp.LossScaler
          init_args: {init_scale: 1024}
  callbacks:
    - class_path: lightning_mp.AccumulationScheduler
      init_args:
        schedule: {"0": 1, "2": 2}
    - class_path: lightning_mp.ChinchillaBudget
      init_args: {tokens: 175}
    - class_path: lightning_mp.OverflowMonitor
model:
  vocabulary: 13
"""

STRING_KEYS = 'schedule: {"0": 1, "2": 2}'


class Project(TokenModel):
    """The user's module."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__(vocabulary=vocabulary)


class ProjectData(pl.LightningDataModule):
    """Six batches of ten tokens."""

    def train_dataloader(self) -> Any:
        ids = torch.randint(0, 11, (6, 2, 6), generator=torch.Generator().manual_seed(0))
        return loader([[rows[:, :-1], rows[:, 1:]] for rows in ids])


@pytest.fixture(autouse=True)
def _own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns if the program, here pytest, has options of its own."""
    monkeypatch.setattr("sys.argv", ["project.py"])


def count_second_entry(batch: Any) -> Tensor:
    return (batch[1] != -100).sum()


def fit(*arguments: str) -> LightningCLI:
    return LightningCLI(Project, ProjectData, save_config_callback=None, args=["fit", *arguments])


def config_file(text: str, name: str = "project.yaml") -> str:
    Path(name).write_text(text)
    return f"--config={name}"


def callback_of(cli: LightningCLI, kind: type[pl.Callback]) -> Any:
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, kind))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "schedule",
    [STRING_KEYS, "schedule: {0: 1, 2: 2}", 'schedule: {"0": "1", "2": "2"}', "schedule: {2: 2}"],
    ids=["string keys", "integer keys", "string values", "later start"],
)
def test_a_yaml_project_follows_its_schedule_to_its_budget(schedule: str) -> None:
    cli = fit(config_file(CONFIG.replace(STRING_KEYS, schedule)))
    plugin = cli.trainer.precision_plugin
    assert type(plugin) is AutocastPrecision
    assert type(plugin.scaler) is LossScaler
    assert plugin.scaler.get_scale() == 1024.0
    # Epochs 0 and 1: 12 windows of 10 tokens. Epoch 2: 20, 20 and, trimmed, 15.
    assert cli.trainer.global_step == 12 + 3
    assert cli.model.trained_tokens == callback_of(cli, ChinchillaBudget).tokens_seen == 175
    assert callback_of(cli, OverflowMonitor).attempted_steps == 15
    assert callback_of(cli, OverflowMonitor).loss_scale == 1024.0


@pytest.mark.full
def test_a_printed_config_is_the_same_project(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(argument: str) -> str:
        with pytest.raises(SystemExit) as stop:
            fit(argument, "--print_config")
        assert stop.value.code == 0
        return capsys.readouterr().out

    original = config_file(CONFIG)
    text = printed(original)
    trainer = yaml.safe_load(text)["trainer"]
    assert trainer["plugins"][0]["class_path"] == "lightning_mp.AutocastPrecision"
    assert trainer["plugins"][0]["init_args"]["scaler"]["init_args"]["init_scale"] == 1024.0
    assert trainer["plugins"][0]["init_args"]["scaler"]["init_args"]["min_scale"] == 2.0**-24
    assert trainer["callbacks"][0]["init_args"]["schedule"] == {"0": 1, "2": 2}
    assert trainer["callbacks"][1]["init_args"]["landing"] == "exact"

    again = config_file(text, "printed.yaml")
    assert printed(again) == text
    first, second = fit(original), fit(again)
    assert first.trainer.global_step == second.trainer.global_step == 15
    assert all(torch.equal(a, b) for a, b in zip(weights(first.model), weights(second.model), strict=True))


@pytest.mark.full
def test_the_config_that_a_run_saves_starts_it_again() -> None:
    first = LightningCLI(Project, ProjectData, args=["fit", config_file(CONFIG)])
    saved = Path("config.yaml")
    assert "lightning_mp.LossScaler" in saved.read_text()
    second = fit(f"--config={saved}")
    assert all(torch.equal(a, b) for a, b in zip(weights(first.model), weights(second.model), strict=True))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:No seed found, seed set to 0")
def test_plugin_and_callbacks_can_be_given_as_options() -> None:
    cli = fit(
        "--trainer.accelerator=cpu",
        "--trainer.max_epochs=2",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.plugins=lightning_mp.AutocastPrecision",
        "--trainer.plugins.precision=bf16-mixed",
        "--trainer.callbacks+=lightning_mp.AccumulationScheduler",
        '--trainer.callbacks.schedule={"0": 1, "1": 3}',
        "--trainer.callbacks+=lightning_mp.OverflowMonitor",
    )
    assert str(cli.trainer.precision_plugin).startswith("AutocastPrecision('bf16-mixed')")
    assert cli.trainer.global_step == callback_of(cli, OverflowMonitor).attempted_steps == 6 + 2


@pytest.mark.full
def test_any_grad_scaler_can_be_nested() -> None:
    text = CONFIG.replace("lightning_mp.LossScaler", "torch.amp.GradScaler").replace(
        "{init_scale", "{device: cpu, init_scale"
    )
    cli = fit(config_file(text))
    assert type(cli.trainer.precision_plugin.scaler) is torch.amp.GradScaler
    assert cli.trainer.precision_plugin.scaler.get_scale() == 1024.0
    assert callback_of(cli, OverflowMonitor).loss_scale == 1024.0


def test_a_count_function_can_be_named_by_its_import_path() -> None:
    budget = f"tokens: 175, landing: ceil, count: {__name__}.count_second_entry"
    cli = fit(config_file(CONFIG.replace("tokens: 175", budget)))
    assert callback_of(cli, ChinchillaBudget).count is count_second_entry
    assert cli.model.trained_tokens == callback_of(cli, ChinchillaBudget).tokens_seen == 180


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [
        ("precision: 16-mixed", "precision: fp16", "Literal['16-mixed', 'bf16-mixed']. Got value: fp16"),
        ("tokens: 175", "tokens: [1, 2]", "Expected a <class 'float'>"),
        ("tokens: 175", "tokens: 175, landing: soft", "Expected a typing.Literal['exact', 'floor', 'ceil', 'nearest']"),
        ("init_scale: 1024", "initial_scale: 1024", "initial_scale"),
    ],
)
def test_a_wrong_entry_ends_the_command_with_code_2(
    written: str, instead: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        fit(config_file(CONFIG.replace(written, instead)))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("instead", "message"),
    [
        ("schedule: {0: 0}", "the entry 0: 0 is not valid. A threshold is an integer from 0"),
        ('schedule: {"0": 1, "-1": 2}', "a number of micro-batches an integer from 1"),
        ('schedule: {"first": 2}', "the entry 'first': 2 is not valid"),
        ("schedule: {}", "for instance {0: 1, 1000: 4}"),
    ],
)
def test_a_wrong_schedule_is_refused_before_anything_is_written(instead: str, message: str) -> None:
    argument = config_file(CONFIG.replace(STRING_KEYS, instead))
    with pytest.raises(ValueError, match="AccumulationScheduler") as error:
        LightningCLI(Project, ProjectData, args=["fit", argument])
    assert message in str(error.value)
    assert [path.name for path in Path().iterdir()] == ["project.yaml"]


def test_the_schedule_of_a_yaml_project_is_plain_integers() -> None:
    """So that checkpoints and printed hyperparameters hold no parser's types."""
    schedule = callback_of(fit(config_file(CONFIG)), AccumulationScheduler).schedule
    assert schedule == {0: 1, 2: 2}
    assert {type(number) for pair in schedule.items() for number in pair} == {int}
