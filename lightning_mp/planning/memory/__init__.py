"""Memory of a training step: measured on tensors without numbers, divided over ranks, or from a decoder's shape."""
