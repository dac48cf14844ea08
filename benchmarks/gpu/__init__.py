"""Suites that need an NVIDIA GPU."""
