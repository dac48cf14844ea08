"""The cost model and the thresholds of lowering."""
