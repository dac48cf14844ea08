"""Quantized types: storage integers, and the ops on them."""
