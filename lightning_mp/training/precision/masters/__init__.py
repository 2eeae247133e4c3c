"""fp32 parameters as masters: their 16-bit copies and gradients, compressed storages, checks."""
