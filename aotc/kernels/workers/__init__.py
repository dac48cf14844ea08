"""The compiler processes and threads, and the cache of what they made."""
