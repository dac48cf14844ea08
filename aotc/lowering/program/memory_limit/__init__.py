"""Fit a program into a memory limit: reorder, rematerialize, spill."""
