"""Attention: which ops are it, and in what blocks a CPU computes it."""
