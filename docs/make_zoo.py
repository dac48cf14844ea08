"""Write docs/zoo.md: the models of examples/zoo and the figures that ``benchmarks models zoo --write`` wrote."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from examples.zoo.models import ZOO  # noqa: E402
from examples.zoo.table import Entry  # noqa: E402

HEAD = """# Models of other libraries

Written by `python docs/make_zoo.py` from `examples/zoo`; do not edit.

{count} models of flax, equinox, keras and transformers, as these libraries build them. Nothing is downloaded: weights
are from a seed, and sizes from the libraries' own configurations, or smaller where it says so. Each is a function of
its inputs that holds its weights:

```python
from pathlib import Path

import jax
from examples.zoo.models import ZOO

function, inputs, weights = ZOO["resnet50"].build(small=False)
exported = jax.export.export(jax.jit(function))(*inputs)
Path("resnet50.jax").write_bytes(exported.serialize())
```

```
aotc compile resnet50.jax -o models/resnet50.vmfb
aotc serve models                                    # POST /v2/models/resnet50/infer
```

`aotc.compile(function, *inputs)` makes the same bundle without a file between. Weights that are swapped later are
arguments ([weights.md](weights.md)).

{libraries}

## Figures

{table}

Compilation: without a cache, processor time of all processes, and in that of the first call of `jax.jit`. A call: one
thread of a Zen 5 that others used too, processor time, median of 7 rounds in turn with `jax.jit` in the same process,
whose time is 1. Bundles are without their source. The largest error of any model is {error:.0e} of the largest value
of a result. `python -m benchmarks models zoo --write` measures again, `make zoo` without writing; `pytest
tests/tools/test_zoo.py` has all of them small, and a server with three.

{notes}
"""
LIBRARIES = """They were taken from jax 0.10.2, flax 0.12.8, equinox 0.13.8, keras 3.15.1, keras-hub 0.32.0 and
transformers 4.57.6 (5.0 has no models of JAX any more). What keras-hub depends on brings TensorFlow, which its networks
do not need with `KERAS_BACKEND=jax`:

```
pip install '.[zoo]' && pip install --no-deps keras-hub
```"""
NOTES = """Not there: T5 of transformers 4.57, which calls `jnp.clip(a_max=)` that JAX has no more."""
COLUMNS = ("Model", "", "Parameters", "Bundle", "Compiled in, of XLA's", "A call", "of jax.jit's")


def row(name: str, entry: Entry, found: dict[str, Any]) -> str:
    """Return a line of the table."""
    cells = [
        f"[`{name}`](#{name})", entry.what, f"{found['parameters'] / 1e6:.1f} M", f"{found['bundle'] / 1e6:.1f} MB",
        f"{found['compile']:.1f} s, {found['compile'] / found['jit']:.1f}", f"{1e3 * found['call']:.2f} ms",
        f"{found['ratio']:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the text of the page."""
    measured = json.loads((ROOT / "examples/zoo/measured.json").read_text())
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [row(name, entry, measured[name]) for name, entry in ZOO.items()]
    error = max(measured[name]["error"] for name in ZOO)
    parts = [HEAD.format(count=len(ZOO), table="\n".join(lines), libraries=LIBRARIES, notes=NOTES, error=error)]
    for library in dict.fromkeys(entry.library for entry in ZOO.values()):
        parts.append(f"## {library}\n")
        for name, entry in ZOO.items():
            if entry.library == library:
                file = Path(inspect.getfile(entry.build)).relative_to(ROOT)
                parts.append(f"### {name}\n\n{entry.what} (`{file}`).\n\n```python\n{code(entry)}```\n")
    return "\n".join(parts)


def code(entry: Entry) -> str:
    """Return the function that builds a model, without the line that adds it to the table."""
    text = inspect.getsource(entry.build)
    return text[text.index("def ") :]


if __name__ == "__main__":
    (ROOT / "docs" / "zoo.md").write_text(page())
