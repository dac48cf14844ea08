"""Sharded models of many ranks."""
