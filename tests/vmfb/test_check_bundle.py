"""What ``compile`` checks of the bundle that it wrote: all that loading would refuse, on any machine."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest

import aotc
from aotc.diagnostics import InternalError
from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.verify.check_bundle import check_bundle

pytestmark = pytest.mark.cpu

MODEL = """module { func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32> } }"""
LEAVES = {"kind": "tuple", "keys": [], "children": []}


@pytest.fixture(scope="module")
def bundle():
    return open_bundle(aotc.compile(MODEL))


def rewritten(bundle, change):
    """The bundle with its manifest and segments changed, and digests that fit them."""
    manifest = deepcopy({k: v for k, v in bundle.manifest.items() if k != "segments"})
    segments = [[row["name"], bytes(bundle.segment(n))] for n, row in enumerate(bundle.manifest["segments"])]
    change(manifest, segments)
    return write_bundle(None, manifest, [tuple(s) for s in segments])


def set_code(name, data):
    def change(manifest, segments):
        next(s for s in segments if s[0].endswith(name))[1] = data

    return change


WRONG = {
    "tree": (lambda m, s: m["functions"]["main"].update(in_tree=LEAVES), "in_tree of function"),
    "dtype": (lambda m, s: m["functions"]["main"]["results"][0].update(dtype="f33"), "unknown dtype"),
    "program": (lambda m, s: m["variants"][0]["functions"]["main"]["code"].pop(), "does not end with return"),
    "commands": (set_code("commands0", b"12345678"), "command buffer 0 is invalid"),
    "library": (lambda m, s: m["variants"][0].pop("library"), "the variant has no kernel library"),
    "executor": (lambda m, s: m["variants"][0].pop("executor"), "the variant has no executor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_faults_are_found_without_loading(bundle, name, monkeypatch):
    change, message = WRONG[name]
    data = rewritten(bundle, change)
    with pytest.raises(BundleError, match=message):
        check_bundle(data)
    monkeypatch.setattr("aotc.pipeline.assemble", lambda *_: data)
    with pytest.raises(InternalError, match=message):
        aotc.compile(MODEL, cache=False)


def test_a_bundle_for_a_gpu_is_checked_without_one():
    pytest.importorskip("numba_cuda")
    bundle = open_bundle(aotc.compile(MODEL, target="cuda:sm_90"))
    check_bundle(rewritten(bundle, lambda m, s: None))
    with pytest.raises(BundleError, match="the machine code is not what the manifest describes"):
        check_bundle(rewritten(bundle, set_code("cubin", b"\x7fELF")))


def test_a_bundle_for_another_machine_is_checked(bundle):
    def elsewhere(manifest, segments):
        manifest["variants"][0]["features"] = ["avx9000"]

    data = rewritten(bundle, elsewhere)
    check_bundle(data)
    with pytest.raises(BundleError, match="lacks avx9000"):
        aotc.load(data)
    np.testing.assert_array_equal(aotc.load(rewritten(bundle, lambda m, s: None))(np.ones(4, "f4")), np.full(4, 2.0))
