"""Memory of a training step, measured on fake tensors."""
