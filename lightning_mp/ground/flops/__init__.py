"""Exact FLOPs of models and operations, peaks of devices, throughput. Needs no Trainer."""
