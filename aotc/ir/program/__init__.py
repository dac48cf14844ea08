"""Program IR: buffers, commands and host code of one function."""
