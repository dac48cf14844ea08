"""What is checked of a bundle from a stranger: its form, its programs, and that a call touches its own memory only."""
