"""Developer tools behind the commands: check, lint, explain, fetch."""
