"""HTML pages of ``aotc report`` and ``aotc diff``."""
