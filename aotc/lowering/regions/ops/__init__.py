"""One function per structural op: how it becomes loops."""
