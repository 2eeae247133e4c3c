"""How a model is split over ranks: the parts of ``FSDP2Strategy``."""
