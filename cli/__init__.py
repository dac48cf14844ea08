"""The command line: thin commands around ``aotc``, imported as ``aotc_cli``."""
