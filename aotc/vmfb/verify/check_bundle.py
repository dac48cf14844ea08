"""The verification that loading a bundle does, without a device."""

from __future__ import annotations

from aotc.vmfb import trees
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.device import device_module_of_variant
from aotc.vmfb.errors import bundle_errors
from aotc.vmfb.verify.program import check_functions
from aotc.vmfb.weights.compressed import check_compressed

_LEAF = {"kind": "leaf"}


def check_bundle(source: bytes) -> None:
    """Verify every variant of a bundle as loading would, also variants that this machine cannot run.

    Raises
    ------
    BundleError
        Its message has the first problem.
    """
    with bundle_errors(source, "checked"):
        bundle = open_bundle(source)
        check_functions(bundle)
        for entry in bundle.manifest["functions"].values():
            trees.make_flattener(entry.get("in_tree") or _LEAF, bundle.where, "args")
            trees.make_unflattener(entry.get("out_tree") or _LEAF)
        for variant in bundle.manifest["variants"]:
            if small := (variant.get("constants") or {}).get("compressed"):
                check_compressed(bundle, small)
            module = device_module_of_variant(variant)
            if module is not None:
                module.check(bundle, variant)
