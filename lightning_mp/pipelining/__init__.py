"""A model cut into stages that work on different chunks of a batch at once: parts of ``PipelineParallelStrategy``."""
