"""Pure functions over gradients: norms, clipping, reductions, copies over ranks, fused optimizers."""
