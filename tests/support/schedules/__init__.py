"""Checks of schedules: trials of the executor, and the required order of accesses."""
