"""Pipeline parallelism: a model split into stages that work on different microbatches at once.

A LightningModule's steps call the names below; they give the same result with and without ``PipelineParallelStrategy``.
"""

from lightning_mp.pipelining.api import pipelined_loss, pipelined_metrics, pipelined_output
from lightning_mp.pipelining.layers import PipelineLayer

__all__ = ["PipelineLayer", "pipelined_loss", "pipelined_metrics", "pipelined_output"]


def __dir__() -> list[str]:
    return __all__
