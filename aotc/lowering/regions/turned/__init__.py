"""What lies across the loops that read it is turned first: blocks of a loop, rows of a reduction."""
