"""What every wing needs, and what knows no training run: state of a run, modules, FLOPs."""
