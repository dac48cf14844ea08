"""Small utilities: memoisation, the recursion limit, garbage collection pauses."""
