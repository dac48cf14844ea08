"""Constants of bundles, inside and outside of the file."""
