"""Inference server (Open Inference Protocol). Needs ``aotc[serve]``; imports the runtime of aotc, not the compiler."""
