"""Compile loop IR to machine code."""
