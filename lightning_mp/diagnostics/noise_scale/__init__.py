"""The gradient noise scale, estimated from gradients of two batch sizes."""
