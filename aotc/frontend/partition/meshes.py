"""Meshes and shardings given to ``aotc.compile``, for functions that do not have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from aotc.diagnostics import CompileError, Loc


def function_on_mesh(model: object, mesh: object, in_shardings: object, out_shardings: object) -> Any:
    """Return a function that is traced for ``mesh``.

    Parameters
    ----------
    model : callable
        A plain or jitted function.
    mesh : mapping of str to int, jax.sharding.Mesh or jax.sharding.AbstractMesh
        Axes with their sizes; no devices are needed.
    in_shardings, out_shardings : pytree of PartitionSpec or Sharding, or None
        As in ``jax.jit``, also with specifications in place of shardings; None: those of the function itself, or of its
        examples. Arguments that the function donates, or that are static, stay so.

    Returns
    -------
    callable or jax.stages.Traced
        For :func:`aotc.frontend.jax_program.program_of`.

    Raises
    ------
    CompileError
        If ``mesh`` is none, or a specification does not fit it.
    """
    if not callable(model):
        what = f"mesh= is for functions, and the model is a {type(model).__name__}"
        raise CompileError.at(Loc(), what, hint="a function with its examples; a program that is exported has its mesh")
    chosen = _mesh_of(mesh, in_shardings, out_shardings)
    if in_shardings is None and out_shardings is None:
        return _Traced(model if hasattr(model, "trace") else jax.jit(model), chosen)
    given = {"in_shardings": in_shardings, "out_shardings": out_shardings}
    shardings = {key: _on_mesh(value, chosen, key) for key, value in given.items() if value is not None}
    try:
        return _Traced(jax.jit(model, **shardings, **_arguments_of_jit(model)), chosen)
    except (TypeError, ValueError) as error:
        raise CompileError.at(Loc(), f"the shardings do not fit: {str(error).splitlines()[0]}") from error


def _arguments_of_jit(model: object) -> dict[str, Any]:
    """Return the donated and static arguments of a jitted function, as keywords of ``jax.jit``."""
    info = getattr(model, "_jit_info", None)
    names = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
    return {name: found for name in names if (found := getattr(info, name, ()))}


class _Traced:
    """A jitted function that is traced with a mesh in its context, as ``with_sharding_constraint`` needs."""

    def __init__(self, function: jax.stages.Wrapped, mesh: AbstractMesh) -> None:
        self._function, self._mesh = function, mesh
        self.__wrapped__ = function
        self._jit_info = getattr(function, "_jit_info", None)  # as of a jitted function: its static arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the function for these examples."""
        with jax.sharding.use_abstract_mesh(self._mesh):
            return self._function.trace(*args, **kwargs)


def _mesh_of(mesh: object, in_shardings: object, out_shardings: object) -> AbstractMesh:
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
    """Return a pytree of shardings in place of one of specifications."""

    def named(spec: object) -> object:
        if not isinstance(spec, PartitionSpec):
            return spec
        try:
            return NamedSharding(mesh, spec)
        except (TypeError, ValueError) as error:
            what = f"{key} has {spec}, which the mesh {dict(mesh.shape)} does not fit"
            raise CompileError.at(Loc(), what, hint="names of its axes") from error

    return jax.tree.map(named, shardings, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
