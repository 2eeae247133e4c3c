"""Which micro-batches make one optimizer step, and how far the run is within one."""
