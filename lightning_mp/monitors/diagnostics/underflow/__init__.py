"""Exponent histograms of gradients and activations, and what a format loses of them."""
