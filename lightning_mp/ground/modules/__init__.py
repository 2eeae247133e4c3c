"""Tools for modules of any model: names, state, wrapped forwards, placeholders for other ranks' pipeline stages."""
