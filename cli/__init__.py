"""The command line; imported as ``aotc_cli``."""
