"""Layers split over ranks: plans, sequence parallelism, vocabulary-parallel embedding and loss."""
