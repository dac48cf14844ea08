"""Products and convolutions of the loop IR: their tiles, and what they read."""
