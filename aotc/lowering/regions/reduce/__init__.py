"""Reduction and prefix scan regions: rows, columns, and row statistics such as softmax."""
