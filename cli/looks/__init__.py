"""Commands that show whole bundles: a page about one, two beside each other."""
