"""Sort and top-k regions."""
