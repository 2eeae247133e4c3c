"""Precisions compared on the user's own model: cost of a step, error of the gradient, and loss in paired runs."""
