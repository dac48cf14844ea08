"""What tests know of schedules: trials of the executor, and what must have run before what."""
