"""Descriptions of kernels in the manifest: arrays and grid, by which a loader can check all memory accesses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from aotc.ir.dims.algebra import Dim, Expr, Sym, product
from aotc.ir.loop.ir import Kernel
from aotc.targets import Target
from aotc.vmfb.abi import COMMANDS_VERSION
from aotc.vmfb.dtypes import size_of
from aotc.vmfb.verify.kernel_interface import Size, interface_digest


class DescribedKernel(Protocol):
    """Interface of a compiled kernel that has an entry in the manifest."""

    def entry(self) -> dict[str, Any]: ...


def kernel_interface_fields(kernel: Kernel) -> dict[str, Any]:
    """Return the fields of a kernel's manifest entry that :mod:`aotc.vmfb.verify.kernel_interface` reads."""
    numbers = {name: n for n, name in enumerate(kernel.dims)}
    return {
        "inputs": len(kernel.inputs),
        "dims": len(kernel.dims),
        "grid": manifest_size_entry(kernel.grid, numbers),
        "extents": [
            manifest_size_entry(product(b.shape) * size_of(b.dtype), numbers) for b in (*kernel.inputs, *kernel.outputs)
        ],
        "aliases": [number for pair in kernel.aliases for number in pair],
    }


def interface_seal(kernels: Iterable[DescribedKernel], target: Target, variant: Mapping[str, Any] | None) -> bytes:
    """Return the digest of a variant and its kernels' manifest entries; the machine code contains it as its seal."""
    alone = {"kind": target.kind, "features": list(target.features), "commands_version": COMMANDS_VERSION}
    return interface_digest({**(variant or alone), "kernels": [kernel.entry() for kernel in kernels]})


def manifest_size_entry(e: Dim, numbers: Mapping[str, int]) -> Size:
    """Return a size in the manifest's form; ``numbers`` are the indices of a kernel's dims."""
    if not isinstance(e, Expr):
        return int(e)
    terms: list[Size] = []
    for monomial, coefficient in e.terms:
        factors: list[Size] = [_size_atom_entry(atom, numbers) for atom in monomial]
        factors += [coefficient] if coefficient != 1 else []
        terms.append(["*", *factors] if len(factors) > 1 else factors[0])
    terms += [e.const] if e.const else []
    return ["+", *terms] if len(terms) > 1 else terms[0]


def _size_atom_entry(atom: Any, numbers: Mapping[str, int]) -> Size:
    if isinstance(atom, Sym):
        return [numbers[atom.name]]
    return [atom.fn, manifest_size_entry(atom.a, numbers), manifest_size_entry(atom.b, numbers)]
