"""From "backward is done" to "stepped or skipped": the gradient epilogue, the loss scale, and the hooks that follow."""
