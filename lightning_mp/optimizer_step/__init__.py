"""From "backward is done" to "stepped or skipped", and who is told."""
