"""Inference server (Open Inference Protocol). Needs ``aotc[serve]``; of aotc it imports the runtime only."""
