"""The pass ``fuse``: grow regions, outline them, record the decisions."""
