"""The CPU device: native executor and its sessions."""
