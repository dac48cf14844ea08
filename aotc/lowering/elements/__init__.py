"""Emit one element of a fused region as scalars of the loop IR, and loops around it."""
