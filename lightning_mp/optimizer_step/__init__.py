"""From "backward is done" to "stepped or skipped", and the hooks that follow."""
