"""Elementwise regions as loops, and their tiled transposes."""
