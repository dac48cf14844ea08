"""Asynchronous calls: submissions, the fences that wait for them, queues and dispatcher threads."""
