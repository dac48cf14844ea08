"""Programs for several devices: partitioned by XLA in a child process into the program of one rank."""
