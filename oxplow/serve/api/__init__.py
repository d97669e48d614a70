"""The HTTP edge: one module for each endpoint, over one service record."""
