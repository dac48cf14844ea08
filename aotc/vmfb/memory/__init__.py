"""Memory of calls: arena, pointers, result pool and memory limit."""
