"""What the runtime shares with the rest of its process: locks that outlive a fork, and who may end a call."""
