"""Analyses that find facts about tensor programs and kernels; they make no decisions."""
