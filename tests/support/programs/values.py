"""Values of a random program, each with shape, dtype and an exactness flag, and the text of the program."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from jax import export, lax

Size = int | str  # a number, or an expression over the symbols a and b
INTEGERS = ("int8", "uint8", "int16", "int32", "uint32", "int64")
FLOATS = ("float32", "float64", "float16", "bfloat16")
SMALL = ("float8_e4m3fn", "float8_e5m2", "int4", "uint4")  # converted, moved and compared only
WHOLE = {"float32": 2.0**24, "float64": 2.0**53, "float16": 2.0**11, "bfloat16": 2.0**8}
EPS = {"float32": 2.0**-23, "float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}
MOST_ELEMENTS = 6000
LARGEST = {"a": 7, "b": 5}


@dataclass(frozen=True, slots=True)
class Val:
    """One value of a program."""

    name: str
    shape: tuple[Size, ...]
    dtype: str
    exact: bool = True
    bound: float = 8.0

    @property
    def rank(self) -> int:
        return len(self.shape)


class Program:
    """A program under construction: its arguments, lines and results."""

    def __init__(self, draw: Callable[[Any], Any], symbolic: bool) -> None:
        self.draw, self.symbolic = draw, symbolic
        self.arguments: list[Val] = []
        self.values: list[Val] = []
        self.lines: list[str] = []
        self.results: tuple[Val, ...] = ()
        self.seed = 0

    @property
    def source(self) -> str:
        """Return the text of the function."""
        names = ", ".join(v.name for v in self.arguments)
        known = {d: f"{v.name}.shape[{n}]" for v in self.arguments for n, d in enumerate(v.shape) if d in ("a", "b")}
        sizes = [f"    {d} = {text}" for d, text in sorted(known.items(), key=lambda pair: str(pair[0]))]
        body = [f"    {line}" for line in self.lines]
        returned = ", ".join(v.name for v in self.results)
        return "\n".join([f"def f({names}):", *sizes, *body, f"    return ({returned},)"])

    def __repr__(self) -> str:
        shapes = ", ".join(f"{v.name}: {v.dtype}[{', '.join(map(str, v.shape))}]" for v in self.arguments)
        return f"# {shapes}; seed {self.seed}\n{self.source}"

    def function(self) -> Callable[..., Any]:
        """Return the Python function."""
        space: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax, "np": np}
        exec(self.source, space)
        return space["f"]

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Return the arguments' types, with symbols where sizes are symbolic."""
        scope = export.SymbolicScope()
        return [
            jax.ShapeDtypeStruct(export.symbolic_shape(", ".join(map(str, v.shape)), scope=scope), jnp.dtype(v.dtype))
            for v in self.arguments
        ]

    def arrays(self, sizes: Mapping[str, int]) -> list[np.ndarray]:
        """Return arguments: whole numbers for floats, some extreme ones for integers."""
        generator = np.random.default_rng(self.seed)
        return [array(generator, tuple(size(d, sizes) for d in v.shape), v.dtype) for v in self.arguments]

    def choose(self, options: Sequence[Any]) -> Any:
        """Draw one of ``options``; the first is the simplest."""
        return self.draw(st.sampled_from(list(options)))

    def some(self, condition: Callable[[Val], bool]) -> list[Val]:
        """Return the values that satisfy ``condition``, the latest first."""
        return [v for v in reversed(self.values) if condition(v)]

    def add(self, text: str, shape: Sequence[Size], dtype: str, exact: bool = True, bound: float = 8.0) -> Val:
        """Append ``name = text`` and return its value."""
        if dtype in WHOLE and (not exact or bound > WHOLE[dtype]):
            exact = False
        made = Val(f"v{len(self.values)}", tuple(shape), dtype, exact, bound)
        self.values.append(made)
        self.lines.append(f"{made.name} = {text}")
        return made


def size(d: Size, sizes: Mapping[str, int]) -> int:
    """Return the value of the size ``d``."""
    return d if isinstance(d, int) else int(eval(d, {"__builtins__": {}}, dict(sizes)))


def elements(shape: Sequence[Size]) -> int:
    """Return the number of elements of ``shape`` at the largest sizes."""
    return math.prod(size(d, LARGEST) for d in shape)


def array(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return random values for an argument."""
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        low, high = (0, 10) if info.min == 0 else (-9, 10)
        values = generator.integers(low, high, shape).astype(dtype)
        extreme = generator.random(shape) < 0.1
        return np.where(extreme, generator.choice([info.min, info.max, info.max - 1], shape).astype(dtype), values)
    if dtype in ("int4", "uint4"):
        return generator.integers(0, 8, shape).astype(getattr(ml_dtypes, dtype))
    return generator.integers(-8, 9, shape).astype(jnp.dtype(dtype))


def tup(items: Sequence[Any]) -> str:
    """Return the text of a tuple."""
    return "(" + "".join(f"{x}, " for x in items) + ")"


def numeric(v: Val) -> bool:
    return v.dtype in INTEGERS or v.dtype in FLOATS


def like(p: Program, v: Val) -> Val:
    """Return a new value of the shape and dtype of ``v``."""
    return p.choose(p.some(lambda w: w.shape == v.shape and w.dtype == v.dtype))
