"""``python -m aotc``: the ``aotc`` command."""

from importlib import import_module

if __name__ == "__main__":
    import_module("aotc_cli.start").main()
