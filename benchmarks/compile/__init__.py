"""Compile time and the memory of the compiler."""
