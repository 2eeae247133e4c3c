"""Layers cut over ranks: plans, sequence parallelism, vocabulary-parallel embedding and loss."""
