"""Models of flax, equinox, keras and transformers, from these libraries' own layers and configurations.

``python -m examples.zoo`` compiles all of them and measures; docs/zoo.md is made of what is here.
"""
