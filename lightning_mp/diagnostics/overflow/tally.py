"""Skipped steps told once per verdict, and counted from then on."""

from collections import Counter

from lightning_mp.diagnostics.overflow.report import OverflowReport


class ReportTally:
    """Which reports are new, and how many there were of each kind.

    The same kind of trouble is what has the same verdict in the same module; the loss scale and a diverged run are the
    same wherever they show.

    >>> tally = ReportTally()
    >>> tally.is_new(OverflowReport(3, 1024.0, ["bias"])), tally.is_new(OverflowReport(4, 512.0, ["bias"]))
    (True, False)
    >>> tally.summary()
    'OverflowPostMortem: 2 optimizer steps were skipped: 2 with non-finite gradients in bias (first at step 3).'
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first_step: dict[str, int] = {}
        self._in_summary = 0

    @property
    def num_reports(self) -> int:
        """All reports so far."""
        return self._counts.total()

    @property
    def has_unreported(self) -> bool:
        """Whether reports were only counted since the last summary."""
        return self.num_reports > max(len(self._counts), self._in_summary)

    def is_new(self, report: OverflowReport) -> bool:
        """Counts a report; whether it is the first of its kind."""
        kind = report.kind
        self._counts[kind] += 1
        self._first_step.setdefault(kind, report.step_index)
        return self._counts[kind] == 1

    def is_summary_due(self) -> bool:
        """At 10, 100, 1000, ... reports, if there is more than was told one by one."""
        number = str(self.num_reports)
        return number == "1" + "0" * (len(number) - 1) and number != "1" and self.has_unreported

    def summary(self) -> str:
        """One line: how many of each kind."""
        self._in_summary = self.num_reports
        parts = [
            f"{count} {kind} (first at step {self._first_step[kind]})" for kind, count in self._counts.most_common()
        ]
        return f"OverflowPostMortem: {self.num_reports} optimizer steps were skipped: {'; '.join(parts)}."
