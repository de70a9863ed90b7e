"""From what the user pinned to the strategies that fulfil it.

A pin names numbers of slices, a strategy names axes. The factors of the operator, in the order in which its operands
name them, take the leading free axes of the mesh whose sizes multiply to the number of slices: under
``((2, 4), (4, 1))`` on eight devices, rows take the first atom and columns the other two, so that the parts of a row
lie on neighbouring ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from shardwright.compiler.capture.ir import Node, Pin
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules.notation import Dims, OpRule, Strategy
from shardwright.errors import StrategyError


def pinned_strategies(node: Node, rule: OpRule, mesh: Mesh) -> tuple[Strategy, ...]:
    """The strategies of ``node`` that fulfil its pin: one, unless the pin leaves operands open.

    Raises:
        StrategyError: where none does; names the operator, the source line and the valid choices.
    """
    pin = node.pin
    assert pin is not None
    try:
        slices = _slices_of_factors(pin, rule)
        axes = _axes_of_factors(slices, rule, mesh)
    except StrategyError as error:
        raise StrategyError(
            f"the strategy {_text(pin)} of {node.op} cannot be: {error}\n"
            f"  operator {node.name} in {node.scope or 'the loss function'}, {node.source}\n"
            f"  {pin}\n"
            f"  rule: {rule}\n"
            f"  valid on {mesh.size} devices: {_choices(rule, mesh)}"
        ) from None
    decided = {name: axes[name] for name in slices}
    if all(strategy is not None for strategy in pin.operands):
        return (rule.strategy(decided),)
    positions = {factor.name: i for i, factor in enumerate(rule.factors)}
    return tuple(
        strategy
        for strategy in rule.strategies(mesh, partial=False)
        if all(strategy.axes[positions[name]] == cut for name, cut in decided.items())
    )


def _slices_of_factors(pin: Pin, rule: OpRule) -> dict[str, int]:
    """Factor name -> slices, from every tensor that the pin speaks of."""
    found: dict[str, int] = {}
    allowed = {rule.factors[i].name for i in rule.splittable}
    tensors = [*zip(pin.operands, rule.operands, strict=True), *zip(pin.results, rule.results, strict=True)]
    for slices, dims in tensors:
        if slices is None:
            continue
        if len(slices) != len(dims):
            raise StrategyError(f"{slices} has {len(slices)} numbers for a tensor of {len(dims)} dims")
        for at, (number, dim) in enumerate(zip(slices, dims, strict=True)):
            name = dim[0] if dim else ""
            if number > 1 and name not in allowed:
                raise StrategyError(f"dim {at} of {slices} may not be split" + (f" (factor {name})" if name else ""))
            if name and found.setdefault(name, number) != number:
                raise StrategyError(f"factor {name} is cut into {found[name]} in one tensor and {number} in another")
    return found


def _axes_of_factors(slices: dict[str, int], rule: OpRule, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    needed = math.prod(slices.values())
    if needed > mesh.size:
        raise StrategyError(
            f"it needs {' x '.join(map(str, slices.values()))} = {needed} devices, there are {mesh.size}"
        )
    free = list(mesh.names)
    taken: dict[str, tuple[str, ...]] = {}
    for name, number in slices.items():
        if rule.sizes[name] % number:
            raise StrategyError(f"a dim of {rule.sizes[name]} rows does not divide into {number} slices")
        taken[name] = _leading_axes(free, number, mesh)
        free = [axis for axis in free if axis not in taken[name]]
    return taken


def _leading_axes(free: Sequence[str], number: int, mesh: Mesh) -> tuple[str, ...]:
    """The first of the shortest subsets of the free axes whose sizes multiply to ``number``."""
    for count in range(len(free) + 1):
        for axes in itertools.combinations(free, count):
            if mesh.extent(axes) == number:
                return axes
    sizes = " x ".join(str(mesh.sizes[axis]) for axis in free) or "none"
    raise StrategyError(f"{number} slices cannot be made of the free axes of the mesh ({sizes})")


def _choices(rule: OpRule, mesh: Mesh, limit: int = 12) -> str:
    """Strategies that would do, those that use most devices first."""
    found = dict.fromkeys(
        (-math.prod(mesh.sizes[a] for a in s.used), tuple(_slices(dims, rule, s, mesh) for dims in rule.operands))
        for s in rule.strategies(mesh, partial=False)
    )
    texts = [str(operands) for _, operands in sorted(found)]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")


def _slices(dims: Dims, rule: OpRule, strategy: Strategy, mesh: Mesh) -> tuple[int, ...]:
    axes = {factor.name: cut for factor, cut in zip(rule.factors, strategy.axes, strict=True)}
    return tuple(mesh.extent(axes[dim[0]]) if dim else 1 for dim in dims)


def _text(pin: Pin) -> str:
    return f"{pin.operands}" + (f" -> {pin.results}" if any(r is not None for r in pin.results) else "")
