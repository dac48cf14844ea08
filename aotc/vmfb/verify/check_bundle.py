"""All that loading checks, without a device."""

from __future__ import annotations

from aotc.vmfb import trees
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.device import module_of
from aotc.vmfb.errors import bundle_errors
from aotc.vmfb.verify.program import check_functions

_LEAF = {"kind": "leaf"}


def check_bundle(source: bytes) -> None:
    """Check all of a bundle that loading checks, for every variant, on a machine that may run none of them.

    Raises
    ------
    BundleError
        Names the first thing that is wrong.
    """
    with bundle_errors(source, "checked"):
        bundle = open_bundle(source)
        check_functions(bundle)
        for entry in bundle.manifest["functions"].values():
            trees.flattener(entry.get("in_tree") or _LEAF, bundle.where, "args")
            trees.unflattener(entry.get("out_tree") or _LEAF)
        for variant in bundle.manifest["variants"]:
            module = module_of(variant)
            if module is not None:
                module.check(bundle, variant)
