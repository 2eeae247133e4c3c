"""What every room stands on: number formats, messages, nested tensors, random state, and private upstream names."""
