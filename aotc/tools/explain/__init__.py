"""The reports of ``aotc explain``: fusion, memory, schedule, and placement on devices."""
