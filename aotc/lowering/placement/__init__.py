"""Assign ops to devices, and values to memory spaces."""
