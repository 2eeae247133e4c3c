"""What the ranks of a Trainer have in common: which of them see different data, and whether they hold all layers."""

import lightning.pytorch as pl


def num_data_ranks(trainer: "pl.Trainer") -> int:
    """Ranks that see different data: not those of one tensor-parallel group."""
    return _sampler(trainer).get("num_replicas", 1)


def data_rank(trainer: "pl.Trainer") -> int:
    """This process among them."""
    return _sampler(trainer).get("rank", 0)


def _sampler(trainer: "pl.Trainer") -> dict[str, int]:
    kwargs: dict[str, int] = getattr(trainer.strategy, "distributed_sampler_kwargs", {})
    return kwargs


def is_pipelined(trainer: "pl.Trainer") -> bool:
    """Whether the Trainer's strategy splits the model into stages; known before it does."""
    return hasattr(trainer.strategy, "pipeline_runner")
