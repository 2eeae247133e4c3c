"""What is wrong with a Trainer, a module and its data before the first step: what was found, checks of it, a report."""
