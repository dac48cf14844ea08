"""Developer tools behind the commands: benchmark, check, lint, explain, profile, inspect, sign."""
