"""All checks of loading a bundle, without a device."""

from __future__ import annotations

from aotc.vmfb import trees
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.device import module_of
from aotc.vmfb.errors import bundle_errors
from aotc.vmfb.verify.program import check_functions
from aotc.vmfb.weights.compressed import check_compressed

_LEAF = {"kind": "leaf"}


def check_bundle(source: bytes) -> None:
    """Make all checks of loading for every variant of a bundle; the machine need not be able to run any.

    Raises
    ------
    BundleError
        Its message has the first problem.
    """
    with bundle_errors(source, "checked"):
        bundle = open_bundle(source)
        check_functions(bundle)
        for entry in bundle.manifest["functions"].values():
            trees.flattener(entry.get("in_tree") or _LEAF, bundle.where, "args")
            trees.unflattener(entry.get("out_tree") or _LEAF)
        for variant in bundle.manifest["variants"]:
            if small := (variant.get("constants") or {}).get("compressed"):
                check_compressed(bundle, small)
            module = module_of(variant)
            if module is not None:
                module.check(bundle, variant)
