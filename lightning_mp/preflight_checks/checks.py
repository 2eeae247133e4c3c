"""All checks in the order of a report."""

from typing import get_args

from lightning_mp.preflight_checks import length_checks, precision_checks, step_checks, weight_checks
from lightning_mp.preflight_checks.found import Found
from lightning_mp.preflight_checks.report import PreflightFinding, Severity

CHECKS = (
    step_checks.check_refusals,
    precision_checks.check_device,
    precision_checks.check_scaler,
    precision_checks.check_precisions,
    precision_checks.check_weights_in_16_bit,
    step_checks.check_step_past_plugin,
    step_checks.check_loss_divided_twice,
    step_checks.check_clipping,
    step_checks.check_dropout_in_recompute,
    weight_checks.check_untrained_weights,
    weight_checks.check_unused_weights,
    weight_checks.check_tied_weights,
    weight_checks.check_frozen_statistics,
    length_checks.check_schedulers,
    length_checks.check_budget,
    length_checks.check_memory,
    length_checks.check_checkpoint,
    precision_checks.check_tensor_cores,
)
"""Each goes from what was found to findings, and looks at nothing else."""


def check_everything(found: Found) -> tuple[PreflightFinding, ...]:
    """All findings, the most severe first."""
    findings = [finding for check in CHECKS for finding in check(found)]
    return tuple(sorted(findings, key=lambda finding: get_args(Severity).index(finding.severity)))
