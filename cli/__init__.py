"""The command line: thin commands around ``aotc`` (import name ``aotc_cli``)."""
