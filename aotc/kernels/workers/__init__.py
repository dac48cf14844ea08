"""The compiler processes, and the cache of what they made."""
