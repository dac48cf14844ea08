"""Reports of ``aotc explain``: fusion, memory, schedule and placement."""
