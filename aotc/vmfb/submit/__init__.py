"""Asynchronous calls: submissions, the fences that signal their end, queues, and dispatcher threads that run them."""
