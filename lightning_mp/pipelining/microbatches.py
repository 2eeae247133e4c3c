"""How a batch becomes the microbatches that follow each other through the stages."""

from itertools import groupby
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed import ProcessGroup

from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.core.ranks import all_gathered
from lightning_mp.training.accumulation.batch_split import Microbatch, UnsplittableBatchError, num_samples, split_batch

ScheduleName = Literal["1f1b", "gpipe"]
"""In which order a stage takes forwards and backwards of microbatches."""


def microbatches_of(batch: Any, most: int) -> list[list[Microbatch]]:
    """The microbatches of a batch, those of one size together: one run through the stages for each size.

    A number of samples that ``most`` divides gives one run. Any other gives two at most, as the stages need tensors of
    one shape within a run.

    >>> import torch
    >>> [[microbatch.samples for microbatch in run] for run in microbatches_of(torch.zeros(7, 2), 4)]
    [[2, 2, 2], [1]]
    """
    try:
        samples = num_samples(batch)
        microbatches = split_batch(batch, -(-samples // most))
    except UnsplittableBatchError as error:
        raise MisconfigurationException(
            f"PipelineParallelStrategy cannot split {error.reason} Every stage works on a part of the samples at a"
            " time: let the data loader return tensors, or lists, mappings and dataclasses of them, with one row for"
            " each sample."
        ) from None
    return [list(run) for _, run in groupby(microbatches, key=lambda microbatch: microbatch.samples)]


def signature(microbatch: Any) -> tuple[Any, ...]:
    """What the shapes between stages depend on: shapes and dtypes of the microbatch's tensors.

    >>> import torch
    >>> signature({"x": torch.zeros(2, 3)})
    ((torch.Size([2, 3]), torch.float32),)
    """
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors_in(microbatch))


def batch_digest(batch: Any) -> list[Any]:
    """A few numbers that differ if batches do. Waits for the device."""
    # A precision audit would take fp64 operations of torch for the model's.
    import numpy as np

    digest: list[Any] = []
    for tensor in tensors_in(batch):
        values = tensor.detach().cpu()
        values = (torch.view_as_real(values) if values.is_complex() else values).flatten()
        if values.is_floating_point() and values.dtype != torch.float64:
            values = values.float()
        wide = values.numpy().astype(np.float64)
        digest.append((tuple(tensor.shape), repr(wide.sum()), repr((wide * np.arange(1, wide.size + 1)).sum())))
    return digest


def refuse_other_batches(batch: Any, group: ProcessGroup, what: Any) -> list[Any]:
    """Compares a batch over the stages of one pipeline, and gathers a value from them."""
    gathered = all_gathered((batch_digest(batch), what), group)
    digests = [digest for digest, _ in gathered]
    different = next((index for index, digest in enumerate(digests) if digest != digests[0]), None)
    if different is not None:
        raise MisconfigurationException(
            f"PipelineParallelStrategy: stages 0 and {different} of one pipeline got different batches. Leave"
            " use_distributed_sampler on, give your sampler trainer.strategy.distributed_sampler_kwargs and one seed,"
            " or seed an iterable dataset alike on all ranks."
        )
    return [value for _, value in gathered]
