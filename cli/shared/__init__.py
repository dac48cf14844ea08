"""Shared parts of the commands: options, inputs, outputs, tables and progress."""
