"""What looks at a call while it runs: dispatches over time, the first value that is no number, names for profilers."""
