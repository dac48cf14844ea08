"""Texts that grow token by token: what is asked, which bundles can, texts decoded together, texts that are kept."""
