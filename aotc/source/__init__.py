"""The model inside of its bundle: what ``aotc upgrade`` compiles again."""
