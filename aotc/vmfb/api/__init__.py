"""Callable objects of a loaded module: functions with pytrees, bound arguments, states, call limits, ranks."""
