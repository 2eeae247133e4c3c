"""One optimizer step and what surrounds it. It imports from ground only."""
