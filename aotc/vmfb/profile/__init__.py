"""Profiling: traces, latencies, counters, rooflines, and measured costs of kernels."""
