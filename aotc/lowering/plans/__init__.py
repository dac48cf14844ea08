"""Lowering decisions with their thresholds: planners choose tile sizes, loops and algorithms for each fused region."""
