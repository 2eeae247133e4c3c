"""Scaling laws: fits, compute-optimal plans, forecasts."""
