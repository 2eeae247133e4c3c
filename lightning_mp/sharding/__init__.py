"""How a model is cut over ranks: the parts of ``FSDP2Strategy``."""
