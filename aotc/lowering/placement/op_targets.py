"""Find the target for which each op is compiled: that of its device or of the options, with the options' limits."""

from __future__ import annotations

from collections.abc import Callable

from aotc.ir.tensor.ir import Module, Op, Value, walk
from aotc.options import Options
from aotc.targets import Target, resolve_targets


def op_targets(module: Module, options: Options) -> tuple[Callable[[Op], Target], frozenset[str]]:
    """Return a function from an op to its target, and the kinds of all targets.

    An op without a device in the model has the target of ``options``.
    """

    def target_with_limits(target: str) -> Target:
        return resolve_targets(target)[0].with_limits(options.stack_limit, options.shared_memory_limit)

    first = target_with_limits(options.target)
    of_device = {name: target_with_limits(target) for name, target in options.devices.items()}
    homes: dict[Value, Target] = {}
    divided = [f.body for f in module.functions.values() if "on" in f.body.names]
    for on in (op for body in divided for op in walk(body) if op.name == "on"):
        target = of_device.get(on.attrs["device"], first)
        homes.update((v, target) for op in walk(on.regions[0]) for v in op.results)
    kinds = frozenset(target.kind for target in (first, *homes.values()))
    return lambda op: homes.get(op.results[0], first) if op.results else first, kinds
