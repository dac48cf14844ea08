"""Simulated times of sharded models on clusters that this machine is not part of."""
