"""Attention templates: mma (from Ampere on), wgmma (Hopper), and decoding with few queries."""
