"""Matmul and convolution templates on tensor cores: mma, wgmma, and their epilogues."""
