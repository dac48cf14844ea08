"""Shared by the lowerings of regions: arrays row by row, library calls, roundings."""
