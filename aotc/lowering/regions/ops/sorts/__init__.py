"""Sorting and selecting: comparisons, digits, runs of equal keys, the largest."""
