"""The command line: ``lightning-mp`` and ``python -m lightning_mp``."""
