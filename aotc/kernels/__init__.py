"""Loop IR to binaries."""
