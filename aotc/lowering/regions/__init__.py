"""Lower fused regions to kernels in loop IR, by the plans of :mod:`aotc.lowering.plans`."""
