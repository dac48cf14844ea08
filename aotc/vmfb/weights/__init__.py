"""Constants and weights of bundles, inside the file and in separate files."""
