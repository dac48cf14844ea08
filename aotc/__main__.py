"""``python -m aotc``: the ``aotc`` command."""

if __name__ == "__main__":
    from aotc_cli.start import main

    main()
