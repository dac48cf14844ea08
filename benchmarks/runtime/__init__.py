"""Calls, submissions, the scheduler, the start of a process."""
