"""Rules of operators that join the elements of some dims: reductions, softmax and scans, losses."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.compiler.rules.notation import OpRule
from shardwright.compiler.rules.operator import Operator, term

Written = Callable[[Operator], OpRule]
NONE, MEAN, SUM = 0, 1, 2  # the numbers that operators use for reduction="none", "mean", "sum"


def reduced(mark: str, *, linear: bool = False, dims: str = "dim") -> Written:
    """The rule of a reduction over the dims in the argument ``dims``, which carry ``mark``."""

    def write(op: Operator) -> OpRule:
        over = op.dims(dims) if dims in op.arguments else range(len(op.operands[0]))
        keepdim = op.arguments.get("keepdim", False)
        left = [f"d{i}{mark if i in over else ''}" for i in range(len(op.operands[0]))]
        right = ["." if i in over else f"d{i}" for i in range(len(op.operands[0])) if keepdim or i not in over]
        passes = linear and op.keeps_sums
        results = ", ".join([term(right, linear=passes)] * len(op.results))
        return op.bind(f"{term(left, linear=passes)} -> {results}")

    return write


def along(dim: str = "dim", *, linear: bool = False) -> Written:
    """The rule of an operator that keeps the shape and needs the dim in the argument ``dim`` whole (softmax, sort)."""

    def write(op: Operator) -> OpRule:
        whole = op.dims(dim)
        dims = term(
            (f"d{i}^" if i in whole else f"d{i}" for i in range(len(op.operands[0]))), linear=linear and op.keeps_sums
        )
        return op.bind(f"{dims} -> {', '.join([dims] * len(op.results))}")

    return write


def resized(*names: str, linear: bool = False) -> Written:
    """The rule of an operator that changes the sizes of the dims in the arguments ``names`` (sort of the first k)."""

    def write(op: Operator) -> OpRule:
        changed = {dim for name in names for dim in op.dims(name)}
        dims = term(("." if i in changed else f"d{i}" for i in range(len(op.operands[0]))), linear=linear)
        return op.bind(f"{dims} -> {', '.join([dims] * len(op.results))}")

    return write


def counted(op: Operator) -> OpRule:
    """histc(x, bins, min, max): counts are sums over the elements, where the bins do not depend on these."""
    mark = "+" if op["min"] < op["max"] else "^"
    return op.bind(f"*{mark} -> .")


def pointwise_loss(op: Operator) -> OpRule:
    """A loss of every element, summed or not. A mean over a local count would be wrong: whole."""
    mark = {NONE: "", SUM: "+", MEAN: "^"}[op["reduction"]]
    operands = ", ".join([f"*{mark}"] * len(op.operands))
    return op.bind(f"{operands} -> {'*' if op['reduction'] == NONE else ''}")


def cross_entropy_loss(op: Operator) -> OpRule:
    """Cross entropy of logits (c) or (n, c, \\*) with class indices (n, \\*) or with probabilities like the logits."""
    mark = "^" if op["reduction"] == MEAN else "+"
    n = f"n{mark} " if len(op.operands[0]) > 1 else ""
    indices = f"{n}*{mark}"
    target = f"{n}c^ *{mark}" if op.operands[0] == op.operands[1] else indices
    return op.bind(f"{n}c^ *{mark}, {target}, c^ -> {indices if op['reduction'] == NONE else ''}")


def nll_loss(op: Operator) -> OpRule:
    """The sum of the chosen log-probabilities (n, c, \\*), and the sum of the weights of their classes."""
    mark = "^" if op["reduction"] == MEAN else "+"
    n = f"n{mark} " if len(op.operands[0]) > 1 else ""
    losses = f"{n}*{mark}" if op["reduction"] == NONE else ""
    return op.bind(f"{n}c^ *{mark}, {n}*{mark}, c^ -> {losses}" + ", " * (len(op.results) - 1))


def cross_entropy_sum(op: Operator) -> OpRule:
    """The summed cross entropy of logits (n, c, \\*), with the weights of the classes behind the target, if any.

    The classes may be split where the target holds indices of them, nothing weighs them, and nothing is smoothed.
    """
    logits, target = op.operands[:2]
    weights, smoothing = op.operands[2:], op.args[4] if len(op.args) > 4 else 0.0
    if logits == target or weights or smoothing:
        targets = "n+ c^ *+" if logits == target else "n+ *+"
        return op.bind(f"n+ c^ *+, {targets}{', c^' * len(weights)} -> ")
    return op.bind("n+ c& *+, n+ *+ -> ")


def cross_entropy_count(op: Operator) -> OpRule:
    """The summed weights of the classes of a target (n, \\*)."""
    return op.bind(f"*+{', c^' * (len(op.operands) - 1)} -> ")
