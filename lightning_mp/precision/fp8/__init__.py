"""How modules become fp8 modules, and which."""
