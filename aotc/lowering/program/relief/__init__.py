"""What is done where a limit on memory is not kept: values made again, or moved to the host and back."""
