"""Quantized types: their integers, and the ops on them."""
