"""``aotc report`` and ``aotc diff``: a bundle as a page, and two beside each other."""
