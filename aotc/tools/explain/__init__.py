"""What ``aotc explain`` shows: fusion, memory, the schedule, where ops run."""
