"""torchmetrics of mixed-precision training: integer counts, summed over ranks."""
