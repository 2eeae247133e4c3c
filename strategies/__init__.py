"""Strategies for mixed-precision training; empty until the first one lands."""

__all__: list[str] = []
