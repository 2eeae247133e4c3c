"""A micro-batch in several chunks, with the same gradient: the parts of ``MicroBatchOnOOM``."""
