"""Which micro-batch, rank, module and tensor overflowed, and why."""
