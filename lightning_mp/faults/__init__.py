"""Checkpoints that a kill cannot spoil, and ranks that are watched."""
