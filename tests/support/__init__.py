"""What several tests share: cases, generators of programs, comparisons, a simulated GPU."""
