"""Gather, scatter and select-and-scatter regions."""
