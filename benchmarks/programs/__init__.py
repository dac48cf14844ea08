"""The programs that the suites measure."""
