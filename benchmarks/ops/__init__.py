"""Single operations on CPUs next to XLA."""
