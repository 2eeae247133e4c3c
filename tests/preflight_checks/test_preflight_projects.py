"""Promise: every finding of `preflight` has a project that gives it; of models with nothing wrong it says nothing."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from innocent_models import INNOCENT_MODELS
from preflight_projects import PROJECTS, Unrolled, write_checkpoints
from small_models import loader, quiet_trainer

from lightning_mp import AutocastPrecision, preflight
from lightning_mp.monitors.preflight_checks.report import FindingName, Severity

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
QUICK_MODELS = ("multi-layer perceptron", "GAN, manual optimization")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(folder)
    return folder


def options_of(name: str, checkpoints: Path) -> dict[str, Any]:
    return {key: checkpoints / value if key == "ckpt_path" else value for key, value in PROJECTS[name].options.items()}


def test_every_name_of_a_finding_has_a_project() -> None:
    assert {project.name for project in PROJECTS.values()} == {*get_args(FindingName)}


def test_the_page_has_every_finding_and_how_grave_it_gets() -> None:
    gravest: dict[str, str] = {}
    for project in sorted(PROJECTS.values(), key=lambda project: get_args(Severity).index(project.severity)):
        gravest.setdefault(project.name, project.severity)
    section = PAGE.read_text().partition("## What preflight finds")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE)
    assert dict(rows) == gravest


@pytest.mark.parametrize("name", PROJECTS)
def test_the_finding_is_given_with_its_cure(name: str, checkpoints: Path) -> None:
    project = PROJECTS[name]
    report = preflight(*project.make(), **options_of(name, checkpoints))
    first = next((finding for finding in report.findings if finding.name == project.name), None)
    assert first is not None, report
    assert first.severity == project.severity, report
    assert project.what in first.what, report
    assert project.cure in first.cure, report
    others = [finding.name for finding in report.findings if finding is not first]
    assert {*others} == {*project.also}, report


@pytest.mark.parametrize(
    "name", [name if name in QUICK_MODELS else pytest.param(name, marks=pytest.mark.full) for name in INNOCENT_MODELS]
)
def test_of_an_innocent_model_nothing_is_said(name: str) -> None:
    model = INNOCENT_MODELS[name]
    trainer = quiet_trainer(plugins=[AutocastPrecision(model.precisions[0])])
    report = preflight(trainer, model.make(), loader(model.batches(2)), device="H100")
    assert report.findings == (), report


@pytest.mark.parametrize("plugin", [AutocastPrecision("bf16-mixed", cache_weights=True), None])
def test_nothing_is_said_of_reused_weights_where_no_copies_are_kept(plugin: Any) -> None:
    """D65."""
    trainer = quiet_trainer(plugins=[plugin] if plugin is not None else [])
    report = preflight(trainer, Unrolled(), loader([[torch.zeros(2, 512), torch.zeros(2, 1)]]))
    assert report.findings == (), report
