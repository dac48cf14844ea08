"""StableHLO to tensor IR."""
