"""Set-up of a pipeline: refusals, the split into stages, and its description."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.ground.flops.throughput import bubble_fraction
from lightning_mp.ground.modules.stage_placeholder import StageSplit
from lightning_mp.pipelining.layers import read_layers
from lightning_mp.pipelining.partition import first_layers, named_split_points, split_model
from lightning_mp.strategies.refused import (
    refuse_copies_of_the_model,
    refuse_scaler_of_torch,
    refuse_sync_batchnorm,
)
from lightning_mp.training.distributed.materialize import materialise, not_initialisable


def arguments_of_any_strategy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a ``DDPStrategy``, whose ways to start processes a pipeline shares, that every strategy has.

    Options of DDP may be there with DDP's own default, as jsonargparse fills them in.
    """
    known = set(inspect.signature(ParallelStrategy.__init__).parameters) - {"self"}
    defaults = {
        name: parameter.default
        for made in (DistributedDataParallel, DDPStrategy)
        for name, parameter in inspect.signature(made).parameters.items()
    }
    for name, value in arguments.items():
        if name not in known and (name not in defaults or value != defaults[name]):
            raise ValueError(
                f"PipelineParallelStrategy({name}=...) is not known; options of DDP have no effect here, because the"
                f" strategy averages gradients itself. Besides its own arguments it takes {', '.join(sorted(known))}."
            )
    return {name: value for name, value in arguments.items() if name in known and value is not None}


def read_split_points(split_points: Sequence[str] | None) -> tuple[str, ...] | None:
    """Checks the argument; a single name is one split point.

    >>> read_split_points("blocks.2"), read_split_points(["blocks.1", "blocks.2"])
    (('blocks.2',), ('blocks.1', 'blocks.2'))
    """
    splits = (split_points,) if isinstance(split_points, str) else split_points
    if splits is None:
        return None
    if not isinstance(splits, Sequence) or not all(isinstance(name, str) for name in splits):
        raise ValueError(
            f"PipelineParallelStrategy(split_points={split_points!r}): it must be names of layers, those that begin the"
            " second and later stages, as in ['blocks.4', 'blocks.8']."
        )
    return tuple(splits)


def refuse_what_cannot_be_split(trainer: "pl.Trainer", strategy: ParallelStrategy) -> None:
    """Refuses plugins, callbacks and settings that consider one rank only, or have copied the whole model."""
    owner = "PipelineParallelStrategy"
    why = "looks at one rank only, and stages would skip different steps"
    refuse_scaler_of_torch(trainer.precision_plugin, owner, why)
    refuse_sync_batchnorm(strategy, owner, "whose statistics would be of one microbatch")
    refuse_copies_of_the_model(trainer, owner, "it is split")


def check_earlier_split(earlier: StageSplit, stage: int, stages: int, split_points: Sequence[str] | None) -> None:
    """A second run of the same module keeps its stages."""
    if (earlier.stages, earlier.stage) != (stages, stage):
        raise MisconfigurationException(
            f"PipelineParallelStrategy: the model was split into {earlier.stages} stages by an earlier run, and this"
            f" one uses {stages}. Make a new model and load its checkpoint."
        )
    if split_points is not None and named_split_points(earlier.layer_names, split_points, stages) != list(
        earlier.first_layers
    ):
        begins = [earlier.layer_names[first] for first in earlier.first_layers[1:]]
        raise MisconfigurationException(
            f"PipelineParallelStrategy: the model was split before {begins} by an earlier run, and this one has"
            f" split_points={list(split_points)!r}. Make a new model and load its checkpoint."
        )


def split_into_stages(
    module: "pl.LightningModule", stage: int, stages: int, split_points: Sequence[str] | None, device: torch.device
) -> StageSplit:
    """Gives all weights the values of rank 0 and keeps those of one stage."""
    layers = read_layers(module)
    splits = first_layers(module, layers, stages, split_points)
    lost = not_initialisable(module)
    if lost:
        raise MisconfigurationException(
            f"PipelineParallelStrategy: modules of class {', '.join(lost)} are on the meta device and have no"
            " reset_parameters(), so nothing can give their parameters and buffers a value. Define it, or build the"
            " model without init_module(empty_init=True)."
        )
    return split_model(module, layers, splits, stage, materialize=partial(materialise, device=device))


def description(split: StageSplit, *, microbatches: int, replicas: int, schedule: str) -> str:
    """The layers of each stage, and the fraction of time in which it is idle."""
    bounds = [*split.first_layers, len(split.layer_names)]
    parts = [
        f"stage {stage}: {split.layer_names[first]} to {split.layer_names[last - 1]},"
        f" {sum(split.layer_parameters[first:last]):,} parameters"
        for stage, (first, last) in enumerate(pairwise(bounds))
    ]
    copies = f", {replicas} copies of the model" if replicas > 1 else ""
    idle = bubble_fraction(split.stages, microbatches)
    return (
        f"PipelineParallelStrategy (experimental): {split.stages} stages{copies}. {'; '.join(parts)}. With"
        f" {microbatches} microbatches per batch stages of equal work are idle {idle:.1%} of a step"
        f" ({schedule}; the bubble, (stages - 1) / (microbatches + stages - 1))."
    )
