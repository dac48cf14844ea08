"""Lowering decisions with their thresholds: tile sizes, attention strategies, GPU row and column plans."""
