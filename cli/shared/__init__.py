"""Functions shared by the commands: options, inputs, outputs, tables and progress."""
