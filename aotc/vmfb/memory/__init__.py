"""Host memory of calls: arenas, memory of results, memory limits, mapped files, guard pages."""
