"""What is checked of a bundle from a stranger besides its form."""
