"""Lowering decisions with their numbers: tile sizes, attention strategies, GPU row and column plans."""
