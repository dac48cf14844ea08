"""Whole models next to other engines, and weights in their forms."""
