"""The model source inside a bundle, for ``aotc upgrade`` and reproducers."""
