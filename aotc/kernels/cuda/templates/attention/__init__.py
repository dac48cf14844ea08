"""Attention templates: mma (from Ampere on), wgmma (Hopper), and split-KV decoding."""
