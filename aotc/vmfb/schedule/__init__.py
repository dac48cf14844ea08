"""Calls that run later: fences, submissions, and the threads that run them."""
