"""Inputs that nobody meant, by number: ``make fuzz``."""
