"""Profiling of bundles: traces of calls, latencies, rooflines, and measured times of kernels for the cost model."""
