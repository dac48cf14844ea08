"""Golden bundles with one changed fact and right checksums: each reader raises a BundleError, or succeeds."""

from copy import deepcopy
from pathlib import Path

import pytest

import aotc
from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.describe import describe_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.verify.check_bundle import check_bundle

pytestmark = pytest.mark.ir

FOLDER = Path(__file__).parents[1] / "golden_bundles"
ODD_KEYS = {"kind": "dict", "keys": [["a"]], "children": [{"kind": "leaf"}]}


def main(manifest):
    return manifest["functions"]["main"]


def first(manifest, key):
    return manifest["variants"][0][key]


def changed(name, change):
    """Return a golden bundle with a change of its manifest."""
    opened = open_bundle(FOLDER / f"{name}.vmfb")
    manifest = deepcopy({k: v for k, v in opened.manifest.items() if k != "segments"})
    change(manifest)
    segments = [(row["name"], bytes(opened.segment(n))) for n, row in enumerate(opened.manifest["segments"])]
    return write_bundle(None, manifest, segments)


REFUSED = {
    "a key of a tree that is a list": ("add", lambda m: main(m).update(out_tree=ODD_KEYS), "with keys"),
    "a bound argument that is not there": ("own_weights", lambda m: main(m).update(bound=[7]), "no bound argument"),
    "a custom call with an unknown dtype": (
        "calls", lambda m: first(m, "custom_calls")[0].update(operands=[["i33", 1]]), "an array of no known type",
    ),
    "a custom call with more than a rank": (
        "calls", lambda m: first(m, "custom_calls")[0].update(results=[["i32", 1, 1]]), "an array of no known type",
    ),
    "a custom call with a negative rank": (
        "calls", lambda m: first(m, "custom_calls")[0].update(results=[["i32", -1]]), "an array of no known type",
    ),
    "a mix of targets without devices": ("mixed", lambda m: m["variants"][0].pop("devices"), "names no devices"),
    "weights in no file": ("own_file", lambda m: m["weights"].pop("file"), "does not say where its weights are"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_load_refuses(name):
    bundle, change, message = REFUSED[name]
    with pytest.raises(BundleError, match=message):
        aotc.load(changed(bundle, change), custom_calls={"golden_counts": print, "golden_scaled_sum": print})


SHOWN = {
    "a program without a signature": ("add", lambda m: m["functions"].update(other=m["functions"].pop("main"))),
    "debug information of a kernel that is a list": (
        "checked", lambda m: m["debug"]["kernels"].update({k: [] for k in m["debug"]["kernels"]}),
    ),
    "an image without a size": ("sm_80", lambda m: first(m, "kernels")[0].update(image=[0])),
    "a part with more kernels than there are": (
        "mixed", lambda m: first(m, "parts")[1].update(count=1 << 60),
    ),
    "a target of no device": ("devices", lambda m: first(m, "devices").clear()),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_inspect_refuses(name):
    data = changed(*SHOWN[name])
    with pytest.raises(BundleError, match=r"cannot be shown|has no signature|kernels"):
        describe_bundle(open_bundle(data), len(data))


def test_a_leaf_that_has_no_children_is_a_leaf():
    data = changed("add", lambda m: main(m).update(out_tree={"kind": "leaf", "children": None}))
    check_bundle(data)
    assert aotc.load(data).functions["main"].signature.out_tree["kind"] == "leaf"


def test_a_tree_may_be_missing():
    data = changed("add", lambda m: (main(m).pop("in_tree"), main(m).pop("out_tree")))
    check_bundle(data)
    aotc.load(data)
