"""fp32 masters of 16-bit weights: where they are kept, cast, checked and saved."""
