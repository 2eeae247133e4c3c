"""A logger that keeps its rows in a list."""

from typing import Any

from lightning.pytorch.loggers import Logger


class MemoryLogger(Logger):
    """What was logged, row by row.

    Attributes:
        rows: pairs of a step and the metrics that were logged there, in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def ours(self) -> list[tuple[int, dict[str, float]]]:
        """Rows with numbers of the pack, without the prefix of their names."""
        short = [(s, {k.removeprefix("mp/"): v for k, v in row.items() if k.startswith("mp/")}) for s, row in self.rows]
        return [(step, row) for step, row in short if row]
