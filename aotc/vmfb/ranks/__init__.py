"""Sharded models: the part of each array that a rank has, and the exchange of arrays between ranks."""
