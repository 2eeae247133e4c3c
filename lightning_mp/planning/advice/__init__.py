"""What to use: precision, strategy, checkpointing and accumulation for a device, a model and a goal."""
