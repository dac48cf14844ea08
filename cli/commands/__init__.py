"""One file per command of ``aotc``."""
