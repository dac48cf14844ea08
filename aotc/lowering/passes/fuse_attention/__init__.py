"""The pass ``fuse_attention``, and splitting keys over blocks."""
