"""Attention templates: mma, wgmma, and decoding with few queries."""
