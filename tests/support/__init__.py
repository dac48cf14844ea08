"""Code shared by tests: cases, generators of programs, comparisons, a simulated GPU."""
