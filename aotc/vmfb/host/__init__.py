"""Services of the host process: files, locks, signals, child processes, CPU features."""
