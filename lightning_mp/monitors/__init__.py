"""What a run does, and what it would need. They import from training, and training never from them."""
