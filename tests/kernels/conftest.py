"""What tests of kernels share."""

import pytest

import aotc
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cpu import build


@pytest.fixture
def compiled(monkeypatch):
    """A function that compiles a program for AVX-512 and returns its kernels."""
    texts, plain = [], build.kernel_requests

    def kernel_requests(named):
        requests = plain(named)
        texts[:] = [request["text"] for request in requests]
        return requests

    monkeypatch.setattr(build, "kernel_requests", kernel_requests)

    def compile_it(function, *args):
        aotc.compile(function, *args, target="cpu:x86-64-v4", cache=False)
        return [parse_kernel(text) for text in texts]

    return compile_it
