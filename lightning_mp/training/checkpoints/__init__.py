"""Checkpoints that survive a kill and another number of ranks: atomic, sharded, single-file."""
