"""Symbolic dimensions: algebra, comparison, intervals and symbols."""
