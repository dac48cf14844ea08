"""Attention on a CPU: blocks of rows in tiles, few rows in the order in which their keys lie."""
