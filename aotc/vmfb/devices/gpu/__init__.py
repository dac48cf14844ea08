"""What a call on a GPU asks of the driver, and what is kept of it for later calls."""
