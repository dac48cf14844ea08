"""The native executor: runs a command graph on CPU threads."""
