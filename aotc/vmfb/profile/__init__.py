"""Profiling: traces, latency, counters, rooflines and measured kernel costs."""
