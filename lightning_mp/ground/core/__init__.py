"""What every package builds on: number formats, messages, nested tensors, random state, and private upstream names."""
