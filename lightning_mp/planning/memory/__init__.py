"""Memory of a training step: measured on fake tensors, divided over ranks, or from a decoder's shape."""
