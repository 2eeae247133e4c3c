"""What is done to modules of any model: names, state, wrapped forwards, recomputed activations."""
