"""Exponent histograms on the device: the parts of ``UnderflowMonitor`` and ``UnderflowFraction``."""
