"""The pass ``canonicalize`` and its rewrite rules."""
