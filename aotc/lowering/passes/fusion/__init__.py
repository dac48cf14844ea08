"""The parts of the pass ``fuse``."""
