"""Passes over the tensor IR, one file each, and what they share."""
