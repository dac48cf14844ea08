"""Loops and branches as commands of a graph: when, with which edges, and what stays as it is."""

from __future__ import annotations
