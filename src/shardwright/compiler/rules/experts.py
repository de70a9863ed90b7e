"""Facts about a mixture of experts (`shardwright.experts`), whose rows are sorted by the expert chosen for them.

Tokens, experts and the inner dim of these may be split. Over axes that split tokens and experts, too, rows travel to
the devices of their experts, and results back. How many do depends on numbers, which nobody knows before: all here is
as for routing that is balanced, in which each expert gets as many rows as the others.
"""

from __future__ import annotations

from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.rules.row import Directions, InternalTensor, Merged, Operator, Saved

RULE = "t d^, t k^, t k^, e+&t g^ f+ d^, e+&t o^ f+ -> t o^"


def products_of_experts(op: Operator) -> int:
    """Return the flops of two or three products for each token and expert that is chosen for it."""
    (_, width), (tokens, choices), _, (_, gates, inner, _), (_, out, _) = op.operands
    return 2 * tokens * choices * inner * (gates * width + out)


def between_experts(op: Operator) -> int:
    """Return the entries that go between the products of experts, and before and behind them: written, and read."""
    (_, width), (tokens, choices), _, (_, gates, inner, _), (_, out, _) = op.operands
    return tokens * choices * (3 * width + 6 * out + 4 * gates * inner)


def kept_by_experts(op: Operator) -> Saved:
    """Return what experts keep: the rows, what follows from the first product, and the results as they come back."""
    (_, width), (_, choices), _, (_, gates, inner, _), (_, out, _) = op.operands
    rows, results, between = (choices * size / max(width, 1) for size in (width, out, 2 * gates * inner))
    experts, columns = (3, 0), (3, 2)
    return Saved(
        (2, 3, 4),
        (),
        (
            InternalTensor("operand", 0, times=rows, split=((0, 0), experts)),
            InternalTensor("operand", 0, times=between, split=((0, 0), experts, columns)),
            InternalTensor("operand", 0, times=results),
        ),
    )


def exchanged_rows(merged: Merged) -> Directions:
    """Numbers of rows, then rows to their experts, and results back; backward the gradients of both.

    As many rows as there are, as routing gives that is balanced: which experts are chosen is not known before.
    """
    (_, width), (tokens, choices), _, (held, *_), (_, out, _) = merged.operands
    rows = tokens * choices // merged.apart
    counts = Collective("all_to_all", merged.axes, held * merged.ranks * 8)
    there, back = (Collective("all_to_all", merged.axes, rows * size * merged.itemsize) for size in (width, out))
    return (counts, there, back), (back, there)
