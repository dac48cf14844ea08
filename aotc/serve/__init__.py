"""A server of bundles by the Open Inference Protocol: needs ``aotc[serve]``, and of aotc only the runtime."""
