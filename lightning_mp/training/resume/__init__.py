"""Resuming to the bit: random state, position in the data, epoch metrics, and the comparison of two runs."""
