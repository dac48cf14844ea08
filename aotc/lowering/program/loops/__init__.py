"""Loops that become one kernel."""
