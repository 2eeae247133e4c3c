"""Which tensor overflowed first, found by running a window again: the parts of ``OverflowPostMortem``."""
