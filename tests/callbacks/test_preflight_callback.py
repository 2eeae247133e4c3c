"""The callback `Preflight` ends a run before its first step, and leaves a right one as it is."""

import pytest
import small_models
import torch
from gloo import run_ranks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from preflight_projects import PROJECTS, DividesByTrainer, Net
from small_models import loader, quiet_trainer, regression_batches

from lightning_mp import (
    AccumulationScheduler,
    ActivationCheckpointing,
    AutocastPrecision,
    MFUMonitor,
    OverflowMonitor,
    PrecisionAudit,
    Preflight,
)


def test_an_error_ends_the_run_before_a_weight_is_changed() -> None:
    module = DividesByTrainer()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    callback = Preflight()
    trainer = quiet_trainer(callbacks=[callback], accumulate_grad_batches=4)
    with pytest.raises(MisconfigurationException, match="(?s)loss_divided_twice.*raise_on='never' only reports"):
        trainer.fit(module, loader(regression_batches(8)))
    assert all(torch.equal(before[name], weight) for name, weight in module.state_dict().items())
    assert callback.report is not None
    assert [finding.severity for finding in callback.report.findings] == ["error"]


def test_raise_on_says_what_ends_the_run() -> None:
    def fit(callback: Preflight) -> None:
        quiet_trainer(callbacks=[callback]).fit(PROJECTS["a frozen norm that learns"].module(), data)

    data = loader(regression_batches(2))
    with pytest.warns(UserWarning, match="frozen_statistics"):
        fit(Preflight())
    with pytest.warns(UserWarning, match="frozen_statistics"):
        fit(Preflight("never"))
    with pytest.raises(MisconfigurationException, match=r"Preflight\(raise_on='warning'\) ends the run"):
        fit(Preflight("warning"))
    with pytest.raises(ValueError, match="raise_on='sometimes'.*must be one of"):
        Preflight("sometimes")  # type: ignore[arg-type]


def test_a_run_is_the_same_with_it() -> None:
    """Dropout, shuffled data, accumulation and a scaler: to the last bit."""

    def weights(*callbacks: Preflight) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = Net()
        module.net.insert(1, torch.nn.Dropout(0.5))
        data = torch.utils.data.DataLoader(regression_batches(8), batch_size=None, shuffle=True)
        others = [OverflowMonitor(), AccumulationScheduler({0: 2})]
        trainer = quiet_trainer(
            plugins=[AutocastPrecision("16-mixed")], callbacks=[*others, *callbacks], gradient_clip_val=1.0
        )
        trainer.fit(module, data)
        return module.state_dict()

    callback = Preflight("advice")
    one, other = weights(), weights(callback)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert callback.report is not None
    assert callback.report.not_checked == ()


def test_those_that_watch_the_first_micro_batch_do_not_see_its_trial() -> None:
    """Wherever it stands among them."""

    def found(*callbacks: Preflight) -> tuple[object, object, object]:
        audit, monitor = PrecisionAudit(), MFUMonitor(unit="sample")
        recomputed = ActivationCheckpointing("net.0")
        small_models.fit(
            Net(), regression_batches(2), audit, monitor, recomputed, *callbacks, plugin=AutocastPrecision("bf16-mixed")
        )
        assert audit.records is not None
        return audit.records.operations, monitor.flop_count, recomputed.report

    assert found(Preflight()) == found()


def _fit_on_two_ranks(rank: int) -> str:
    callback = Preflight()
    trainer = quiet_trainer(
        strategy=DDPStrategy(process_group_backend="gloo"), devices=2, callbacks=[callback], accumulate_grad_batches=4
    )
    with pytest.raises(MisconfigurationException) as raised:
        trainer.fit(DividesByTrainer(), loader(regression_batches(8)))
    assert callback.report is not None
    return str(raised.value)


@pytest.mark.full
def test_every_rank_ends_with_the_same_error() -> None:
    first, second = run_ranks(_fit_on_two_ranks, 2)
    assert "loss_divided_twice" in first
    assert first == second
