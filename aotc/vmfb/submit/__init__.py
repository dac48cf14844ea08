"""Asynchronous calls: fences, submissions, queues and dispatcher threads."""
