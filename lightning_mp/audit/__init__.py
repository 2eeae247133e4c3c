"""What dtype each operation of a step really used: the parts of ``PrecisionAudit``."""
