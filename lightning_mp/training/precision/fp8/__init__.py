"""How linear layers become fp8 layers, and ordinary ones again."""
