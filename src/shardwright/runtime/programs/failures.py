"""Explains an error in an operator of a program by the user's line and input, not the program's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor

from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.capture.tracing.sizes.open_sizes import in_batch
from shardwright.compiler.lower.program import Instruction, LocalProgram
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.table import Column, column
from shardwright.errors import UsageError


@dataclass(frozen=True)
class Indices:
    """That operand ``index`` of an operator holds numbers below ``size``; ``what`` these number.

    Numbers from ``lowest`` on are fine, and so is ``ignored``.
    """

    index: int
    size: int
    what: str
    lowest: int = 0
    ignored: int | None = None


Shapes = list[tuple[int, ...]]
_Found = Callable[[Node, Shapes], Iterator[Indices]]


def _rows(node: Node, shapes: Shapes) -> Iterator[Indices]:
    yield Indices(1, shapes[0][0], "rows in the table")


def _classes(ignored: int) -> _Found:
    """A loss whose target is its second operand; argument ``ignored`` says which class does not count."""

    def found(node: Node, shapes: Shapes) -> Iterator[Indices]:
        if len(shapes[1]) < max(len(shapes[0]), 2):  # else the target holds probabilities
            size = shapes[0][1] if len(shapes[0]) > 1 else shapes[0][0]
            yield Indices(1, size, "classes", ignored=node.args[ignored] if len(node.args) > ignored else -100)

    return found


def _counted_classes(node: Node, shapes: Shapes) -> Iterator[Indices]:
    if len(shapes) > 1:
        yield Indices(0, shapes[1][0], "classes", ignored=node.args[2])


def _along_dim(node: Node, shapes: Shapes) -> Iterator[Indices]:
    dim = int(node.args[1]) % max(len(shapes[0]), 1)
    yield Indices(1, shapes[0][dim] if shapes[0] else 1, f"entries along dim {dim}")


def _hot(node: Node, shapes: Shapes) -> Iterator[Indices]:
    yield Indices(0, int(node.args[1]), "classes")


def _each_dim(node: Node, shapes: Shapes) -> Iterator[Indices]:
    for dim, given in enumerate(node.args[1]):
        if isinstance(given, Operand):
            size = shapes[0][dim]
            yield Indices(given.index, size, f"entries along dim {dim}", lowest=-size)


# Column of the table of operators: which operands hold numbers of what.
INDICES: Column[_Found] = column(
    ("embedding", _rows),
    ("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward", _classes(4)),
    ("shardwright.cross_entropy_sum", _classes(3)),
    ("shardwright.cross_entropy_count", _counted_classes),
    ("index_select gather scatter scatter_add", _along_dim),
    ("one_hot", _hot),
    ("index.Tensor", _each_dim),
)


def explained(error: Exception, program: LocalProgram, code: CodeType, capture: Capture) -> Exception:
    """Return the error to raise for one that came out of ``program``, which ran as ``code``.

    It is the same one with the user's line, or another where an index of the user's is out of range.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    instruction = None if trace is None else program.lines[trace.tb_lineno - 1][1]
    if trace is None or instruction is None or instruction.node is None:
        return error
    variables = trace.tb_frame.f_locals
    if problem := _out_of_range(instruction, instruction.node, variables, capture):
        return UsageError(problem)
    given = ", ".join(_kind(variables.get(name)) for name in instruction.reads) or "no tensors"
    node = instruction.node
    where = f"in {node.op} of {node.scope or 'the loss function'}, which got {given}, at {node.source}"
    return with_text(error, where)


def with_text(error: Exception, text: str) -> Exception:
    """Return the error with another line in its message."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0].rstrip()}\n{text}", *error.args[1:])
    else:
        error.add_note(text)
    return error


def _out_of_range(instruction: Instruction, node: Node, variables: Mapping[str, Any], capture: Capture) -> str | None:
    """Return what is wrong with the first index that is, None where none is."""
    found = INDICES.of(node.op)
    shapes = [capture.values[name].shape for name in node.operands]
    for indices in found(node, shapes) if found is not None else ():
        held = variables.get(instruction.reads[indices.index])
        if not isinstance(held, Tensor) or held.is_floating_point():
            continue
        wrong = held[((held < indices.lowest) | (held >= indices.size)) & (held != indices.ignored)]
        if wrong.numel():
            return _wrong_index(node, indices, int(wrong[0]), capture)
    return None


def out_of_range(capture: Capture, operator: int, number: int) -> str:
    """That one of the indices which an operator of the graph got is ``number``, and which there are."""
    node = capture.nodes[operator]
    found = INDICES.of(node.op)
    assert found is not None
    return _wrong_index(
        node, next(found(node, [capture.values[name].shape for name in node.operands])), number, capture
    )


def _wrong_index(node: Node, indices: Indices, number: int, capture: Capture) -> str:
    whose = named_in_batch(node.operands[indices.index], capture)
    known = f"there are {indices.size} {indices.what}, 0 to {indices.size - 1}"
    return f"{whose} holds {number}, and {known}, at {node.source}"


def named_in_batch(value: str, capture: Capture) -> str:
    """Return what a person calls a value: the tensor of the batch that it is, or those from which it was made."""
    if capture.values[value].kind == "input":
        return in_batch(capture.values[value].label)
    makers = {result: node for node in capture.nodes for result in node.results}
    inputs: dict[str, None] = {}
    seen, todo = set(), [value]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if capture.values[name].kind == "input":
            inputs.setdefault(in_batch(capture.values[name].label))
        if name in makers:
            todo += makers[name].operands
    return f"an index made from {' and '.join(sorted(inputs))}" if inputs else "an index"


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
