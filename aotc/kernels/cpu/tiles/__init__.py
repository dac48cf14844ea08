"""Register tiles: one vector function per tile shape."""
