"""Recomputed activations: the wrapper of a module's forward, and what it costs and saves."""
