"""Buffer ownership: which values share memory, and which copies remain."""
