"""The loss scale: its update rule and the scaler that follows it."""
