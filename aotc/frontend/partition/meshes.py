"""Meshes and shardings given to ``aotc.compile``: those of functions, and axes for programs that are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.mlir import RawModel, fetch_whole, is_for_several_devices
from aotc.vmfb.ranks.layout import mesh_of


def function_on_mesh(model: object, mesh: object, in_shardings: object, out_shardings: object) -> Any:
    """Return a function whose trace uses ``mesh`` and these shardings.

    Parameters
    ----------
    model : callable
        A plain or jitted function.
    mesh : mapping of str to int, jax.sharding.Mesh or jax.sharding.AbstractMesh
        Axes with their sizes; no devices are needed.
    in_shardings, out_shardings : pytree of PartitionSpec or Sharding, or None
        As in ``jax.jit``; a specification may replace a sharding. None means the shardings of the function itself, or
        of its examples. Donated and static arguments of the function remain so.

    Returns
    -------
    callable or jax.stages.Traced
        For :func:`aotc.frontend.jax_program.program_of`.

    Raises
    ------
    CompileError
        If ``mesh`` is not a mesh, or a specification does not fit it.
    """
    chosen = _mesh_of(mesh, in_shardings, out_shardings)
    if in_shardings is None and out_shardings is None:
        return _Traced(model if hasattr(model, "trace") else jax.jit(model), chosen)
    stated = {"in_shardings": in_shardings, "out_shardings": out_shardings}
    shardings = {key: _on_mesh(value, chosen, key) for key, value in stated.items() if value is not None}
    try:
        return _Traced(jax.jit(model, **shardings, **_arguments_of_jit(model)), chosen)
    except (TypeError, ValueError) as error:
        raise CompileError.at(Loc(), f"the shardings do not fit: {str(error).splitlines()[0]}") from error


def is_on_mesh(model: object) -> bool:
    """Return True if a model is a function that :func:`function_on_mesh` has given a mesh of several devices."""
    return isinstance(model, _Traced) and model.mesh.size > 1


def read_on_mesh(model: object, mesh: object, in_shardings: object, out_shardings: object) -> RawModel:
    """Read a model that has shardings, and give its mesh other axes.

    Parameters
    ----------
    model : str, bytes, path, jax.export.Exported, jax.stages.Traced, jax.stages.Lowered or RawModel
    mesh : mapping of str to int, jax.sharding.Mesh or jax.sharding.AbstractMesh
    in_shardings, out_shardings : None
        Shardings are part of the program.

    Raises
    ------
    CompileError
        If the model cannot be read, is for one device, or ``mesh`` is none.
    """
    kind = type(model).__name__
    if in_shardings is not None or out_shardings is not None:
        what = f"in_shardings and out_shardings are for functions, and the model is a {kind}"
        raise CompileError.at(Loc(), what, hint="a function with its examples; the shardings of a program stay")
    axes = tuple(_mesh_of(mesh, None, None).shape.items())
    raw = fetch_whole(model)
    if "ranks" in raw.metadata:
        what = f"mesh: the program is that of one rank already, on {mesh_of(raw.metadata['ranks']['mesh'])}"
        raise CompileError.at(Loc(raw.path), what, hint="the program as it was before, or no mesh")
    if not is_for_several_devices(raw):
        hint = "aotc.compile(f, x, mesh=..., in_shardings=...), or jax.export of a function with shardings"
        raise CompileError.at(Loc(raw.path), "mesh: the program has no shardings, it is for one device", hint=hint)
    return replace(raw, metadata={**raw.metadata, "axes": axes}, digest=b"")


def _arguments_of_jit(model: object) -> dict[str, Any]:
    """Return the donated and static arguments of a jitted function, as keywords of ``jax.jit``."""
    info = getattr(model, "_jit_info", None)
    names = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
    return {name: value for name in names if (value := getattr(info, name, ()))}


class _Traced:
    """A jitted function that is traced with a mesh in its context, as ``with_sharding_constraint`` needs."""

    def __init__(self, function: jax.stages.Wrapped, mesh: AbstractMesh) -> None:
        self._function, self.mesh = function, mesh
        self.__wrapped__ = function
        self._jit_info = getattr(function, "_jit_info", None)  # as of a jitted function: its static arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the function for these examples."""
        with jax.sharding.use_abstract_mesh(self.mesh):
            return self._function.trace(*args, **kwargs)


def _mesh_of(mesh: object, in_shardings: object, out_shardings: object) -> AbstractMesh:
    """Convert the ``mesh`` argument of ``aotc.compile`` to JAX's form; without one, use the mesh of a sharding."""
    match mesh:
        case AbstractMesh():
            return mesh
        case Mesh():
            return mesh.abstract_mesh
        case Mapping() if mesh and all(isinstance(k, str) and _is_size(n) for k, n in mesh.items()):
            return AbstractMesh(tuple(mesh.values()), tuple(mesh))
        case None:
            named = [s for s in jax.tree.leaves((in_shardings, out_shardings)) if isinstance(s, NamedSharding)]
            if named:
                return _mesh_of(named[0].mesh, None, None)
            raise CompileError.at(Loc(), "shardings without a mesh", hint='mesh={"data": 2, "model": 4}')
    hint = 'mesh={"data": 2, "model": 4}, a jax.sharding.Mesh or AbstractMesh'
    raise CompileError.at(Loc(), f"mesh is {mesh!r}", hint=hint)


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _on_mesh(shardings: object, mesh: AbstractMesh, key: str) -> Any:
    """Convert the partition specs in the pytree ``shardings`` to shardings on ``mesh``."""

    def named(spec: object) -> object:
        """Return a partition specification as a sharding on the mesh; other shardings are unchanged."""
        if not isinstance(spec, PartitionSpec):
            return spec
        try:
            return NamedSharding(mesh, spec)
        except (TypeError, ValueError) as error:
            what = f"{key} has {spec}, which the mesh {dict(mesh.shape)} does not fit"
            raise CompileError.at(Loc(), what, hint="names of its axes") from error

    return jax.tree.map(named, shardings, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
