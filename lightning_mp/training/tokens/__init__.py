"""What is counted and weighed: tokens of a batch, the run's totals, budgets, learning rates over tokens."""
