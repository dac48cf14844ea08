"""Products and convolutions: their forms, their precision, and how their operands lie."""
