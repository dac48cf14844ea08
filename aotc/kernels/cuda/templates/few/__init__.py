"""Attention of few queries, of which all that takes time is to read keys and values."""
