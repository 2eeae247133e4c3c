"""What a preflight reports: findings with severity and cure, and what could not be checked."""

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from typing_extensions import override

Severity = Literal["error", "warning", "advice"]
"""How severe a finding is.

"error": the run fails, or trains something other than it says. "warning": most likely not intended. "advice": correct,
but slower than necessary.
"""

FindingName = Literal[
    "device",
    "fp8",
    "scaler_missing",
    "scaler_superfluous",
    "detect_anomaly",
    "two_precisions",
    "weights_in_16_bit",
    "frozen_in_fp32",
    "tensor_cores",
    "loss_divided_twice",
    "step_past_plugin",
    "clipping_ignored",
    "scheduler_length",
    "dropout_in_recompute",
    "untrained_weights",
    "unused_weights",
    "frozen_statistics",
    "eval_mode",
    "tied_weights",
    "budget",
    "memory",
    "reused_weights",
    "checkpoint",
    "refused",
    "dtypes",
]
"""What a finding is about; `docs/troubleshooting.md` says what each means."""

_WIDTH = 110


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """One problem that a preflight found.

    >>> print(PreflightFinding("advice", "tensor_cores", "out_features is 50257.", "Make it 50304."))
    advice tensor_cores: out_features is 50257. Make it 50304.
    """

    severity: Severity  # how severe it is
    name: FindingName  # what it is about
    what: str  # what was found, and what is wrong with it
    cure: str  # what to do

    @override
    def __str__(self) -> str:
        return f"{self.severity} {self.name}: {self.what} {self.cure}"


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """All findings of one preflight.

    >>> print(PreflightReport((PreflightFinding("warning", "budget", "The data end early.", "Use more."),)))
    Preflight: 0 errors, 1 warning, 0 advice
      warning  budget                The data end early.
                                     -> Use more.
    """

    findings: tuple[PreflightFinding, ...]  # the most severe first; empty if nothing is wrong
    not_checked: tuple[tuple[str, str], ...] = ()  # what could not be checked, and why

    def at_least(self, severity: Severity) -> tuple[PreflightFinding, ...]:
        """Findings at least as severe as ``severity``."""
        included = get_args(Severity)[: get_args(Severity).index(severity) + 1]
        return tuple(finding for finding in self.findings if finding.severity in included)

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists and strings."""
        return {"findings": [asdict(finding) for finding in self.findings], "not_checked": dict(self.not_checked)}

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @override
    def __str__(self) -> str:
        errors, warnings, advice = (
            sum(finding.severity == severity for finding in self.findings) for severity in get_args(Severity)
        )
        unseen = f"; {_counted(len(self.not_checked), 'part')} not checked" if self.not_checked else ""
        lines = [f"Preflight: {_counted(errors, 'error')}, {_counted(warnings, 'warning')}, {advice} advice{unseen}"]
        for finding in self.findings:
            lines += _row(f"  {finding.severity:<8} {finding.name:<21} ", finding.what, f"-> {finding.cure}")
        for what, reason in self.not_checked:
            lines += _row(f"  {'-':<8} {what:<21} ", f"not checked: {reason}")
        return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _row(margin: str, *paragraphs: str) -> list[str]:
    lines = [
        line
        for text in paragraphs
        for line in textwrap.wrap(text, _WIDTH - len(margin), break_long_words=False) or [""]
    ]
    return [margin + lines[0], *(" " * len(margin) + line for line in lines[1:])]
