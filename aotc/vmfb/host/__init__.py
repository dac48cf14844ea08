"""Services of the host process and its operating system: files, locks, signals, CPU features, LAPACK."""
