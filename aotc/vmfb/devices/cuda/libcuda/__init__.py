"""Bindings of libcuda by ctypes: functions, graphs and device-side loops."""
