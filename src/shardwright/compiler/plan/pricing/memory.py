"""Memory beside the parameters: tensors saved for the backward, blocks of activation checkpointing, optimizer states.

The table of operators says what each of them saves (`rules.row.Saved`). A tensor that several save is held once. The
result of a view lies in the memory of its operand, unless it is a reshape of what lies there in another order: torch's
meta device tells, by the whole shapes.

A *block* is a module whose operators run one after the other. Its inputs are kept, and from them the backward
recomputes it, up to the last operator that saves anything: what follows that one in the module is not needed. What the
block makes for others is made by the forward alone.

An optimizer that works entry by entry keeps tensors like the parameter, sharded as it is, and a few numbers. How many
is not written down here: the optimizer makes a step on a parameter of fifteen entries, and its state is counted.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.compiler.capture.evaluate import call
from shardwright.compiler.capture.facts import operator_of, saved
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.layout import Layout
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Step, copies, moves_alone
from shardwright.compiler.plan.pricing.graph import RuledGraph
from shardwright.compiler.rules.row import Operator, Saved
from shardwright.compiler.rules.table import Column, column, row_of
from shardwright.errors import UsageError

_META = torch.device("meta")


def _saved_by_dropout(op: Operator) -> Saved | None:
    """Return what attention with dropout saves: its operands alone, since the backward computes its scores again."""
    return Saved(operands=tuple(range(len(op.operands)))) if op["dropout_p"] else None


def _in_order_of_heads(op: Operator, result: Tensor) -> Tensor:
    """Return attention's result as it lies in memory: a query's heads side by side, with our dropout head by head."""
    return (
        result if op["dropout_p"] or result.ndim < 4 else torch.empty_like(result.transpose(-3, -2)).transpose(-3, -2)
    )


# Columns of the table of operators: what the form on local parts keeps where it is another, and in which order the
# dims of a result lie in memory where that is not their own.
KEPT_LOCALLY: Column[Callable[[Operator], Saved | None]] = column(("scaled_dot_product_attention", _saved_by_dropout))
ORDERS: Column[Callable[[Operator, Tensor], Tensor]] = column(("scaled_dot_product_attention", _in_order_of_heads))


def local_bytes(value: Value, layout: Layout, mesh: Mesh, rank: int = 0) -> int:
    """The bytes of a rank's part of a value; no rank has more than rank 0."""
    return torch.Size(layout.local_shape(value.shape, mesh, rank)).numel() * value.dtype.itemsize


def repeatable(value: Value, steps: Sequence[Step]) -> bool:
    """Return whether the backward can repeat a redistribution in place of saving its result.

    Only of parameters and what has a gradient: others, as targets, are small, and may be saved in another form.
    """
    return copies(steps) and moves_alone(steps) and (value.kind == "parameter" or value.needs_gradient)


class SavedTensors:
    """The tensors that the operators of a graph save for its backward; one per graph, by `RuledGraph.once`."""

    def __init__(self, graph: RuledGraph) -> None:
        self.graph = graph
        self.saved = {node.name: self._saved(node) for node in graph.capture.nodes}

    def _saved(self, node: Node) -> Saved:
        kept = saved(node, self.graph.capture)
        locally = KEPT_LOCALLY.of(node.op)
        if kept == Saved() or locally is None:
            return kept
        return locally(operator_of(node, self.graph.capture)) or kept

    def times(self, node: Node, index: int) -> int:
        """Return how many operators save an operand, or a view of it where it lies."""
        found = int(index in (self.saved[node.name].operands or ()))
        if index == 0 and node.name in self.views:
            found += sum(self.times(use.node, use.index) for name in node.results for use in self.graph.uses[name])
        return found

    def internal_bytes(self, node: Node, layout_of: Callable[[str], Layout], mesh: Mesh, rank: int = 0) -> int:
        """The bytes of what an operator makes inside itself and keeps, by the layouts of its operands and results."""
        total = 0.0
        for part in self.saved[node.name].internal:
            name = (node.operands if part.like == "operand" else node.results)[part.index]
            value = self.graph.capture.values[name]
            if part.split:
                layouts = [(layout_of(node.operands[index]).dims[dim]) for index, dim in part.split]
                size = math.prod(value.shape) / mesh.extent({axis for cut in layouts for axis in cut.axes})
            else:
                size = local_bytes(value, layout_of(name), mesh, rank) / value.dtype.itemsize
            total += size * part.times * (part.itemsize or value.dtype.itemsize)
        return int(total)

    @cached_property
    def views(self) -> frozenset[str]:
        """The names of the operators whose results lie in the memory of their first operand.

        Cached: the graph is frozen.
        """
        return frozenset(_views(self.graph))


def _views(graph: RuledGraph) -> Iterator[str]:
    capture = graph.capture
    laid: dict[str, Tensor] = {}  # values on the meta device, as they lie in memory
    # Results, and whether they lie in the operand's memory. Cached by the call and the form of its operands: a view
    # depends on nothing else, wherever in memory it begins.
    known: dict[Hashable, tuple[list[Tensor], bool]] = {}

    def of(name: str) -> Tensor:
        value = capture.values[name]
        return laid.setdefault(name, torch.empty(value.shape, dtype=value.dtype, device=_META))

    for node in capture.nodes:
        if (order := ORDERS.of(node.op)) is not None:
            [name] = node.results
            laid[name] = order(operator_of(node, capture), of(name))
        elif row_of(node.op).view and node.operands:
            operands = [of(name) for name in node.operands]
            key = node.call, tuple((x.shape, x.stride(), x.dtype) for x in operands)
            if key not in known:
                made = call(node, operands, _META)
                known[key] = made, all(x.untyped_storage() is operands[0].untyped_storage() for x in made)
            made, inside = known[key]
            laid.update(zip(node.results, made, strict=True))
            if inside:
                yield node.name


@dataclass(frozen=True)
class Block:
    """A module and its operators up to the last that keeps anything, in order of execution."""

    name: str
    nodes: tuple[Node, ...]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the operators."""
        return frozenset(node.name for node in self.nodes)

    def computed_again(self, kept: SavedTensors) -> tuple[Node, ...]:
        """The operators whose work is done twice: not the last one where it keeps nothing but what it is given."""
        last = kept.saved[self.nodes[-1].name]
        return self.nodes if last.results or last.internal else self.nodes[:-1]


class Blocks:
    """The blocks of a graph, by the path of the module."""

    def __init__(self, graph: RuledGraph) -> None:
        self._graph, self._kept = graph, graph.once(SavedTensors)
        self._known: dict[str, Block | None] = {}

    def named(self, name: str) -> Block | None:
        """The block of a module; None where there is none, or nothing of it is kept."""
        if name not in self._known:
            self._known[name] = self._made(name)
        return self._known[name]

    def _made(self, name: str) -> Block | None:
        nodes = self._graph.capture.nodes
        keeps = [at for at in self._spans.get(name, range(0)) if self._kept.saved[nodes[at].name] != Saved()]
        return Block(name, nodes[self._spans[name].start : keeps[-1] + 1]) if keeps else None

    def repeated(self) -> tuple[Block, ...]:
        """The layers of the model: blocks that stand beside equal ones, and keep what they made themselves.

        Of those that lie in one another the outermost.
        """
        alike: dict[Hashable, list[str]] = defaultdict(list)
        nodes, rules = self._graph.capture.nodes, self._graph.rules
        for name, span in self._spans.items():
            operators = tuple(id(rules[node.name]) for node in nodes[span.start : span.stop])
            alike[name.rpartition(".")[0], operators].append(name)
        found = (self.named(name) for names in alike.values() if len(names) > 1 for name in names)
        return _outermost([block for block in found if block is not None and self._saves(block)])

    def matching(self, patterns: Sequence[str], *, demanded: bool) -> tuple[Block, ...]:
        """The blocks of the modules whose paths match one of these patterns, of those in one another the outermost.

        Raises:
            UsageError: with ``demanded``, where a pattern matches no module that runs at once.
        """
        found: list[Block] = []
        for pattern in patterns:
            names = [name for name in self._spans if fnmatchcase(name, pattern)]
            if demanded and not names:
                shown = ", ".join(list(self._spans)[:8]) or "none"
                raise UsageError(
                    f"recompute names {pattern!r}, which no module matches that is run at once; there are {shown}"
                )
            found += [block for block in map(self.named, names) if block is not None]
        return _outermost(list(dict.fromkeys(found)))

    def _saves(self, block: Block) -> bool:
        """Return whether the operators of the block save more results of their own than the block is given."""
        values, kept = self._graph.capture.values, set()
        for node in block.nodes:
            saved = self._kept.saved[node.name]
            kept |= {node.operands[i] for i in saved.operands or ()} | {node.results[i] for i in saved.results or ()}
        made = {name for node in block.nodes for name in node.results}
        given = {name for node in block.nodes for name in node.operands} - made
        given_bytes = sum(values[name].bytes for name in given if values[name].kind == "result")
        return sum(values[name].bytes for name in kept & made) > given_bytes

    @cached_property
    def _spans(self) -> Mapping[str, range]:
        """The positions of the operators of each module that is run at once, in order of execution.

        Cached: the graph is frozen.
        """
        at: dict[str, list[int]] = defaultdict(list)
        for position, node in enumerate(self._graph.capture.nodes):
            parts = node.scope.split(".") if node.scope else []
            for depth in range(1, len(parts) + 1):
                at[".".join(parts[:depth])].append(position)
        return {
            name: range(positions[0], positions[-1] + 1)
            for name, positions in at.items()
            if positions[-1] - positions[0] == len(positions) - 1
        }


def moved_inside(value: Value, before_bytes: int, after_bytes: int) -> bool:
    """Return whether recomputing a block repeats the redistribution of a value that it reads.

    It does where less is saved so, as of what is gathered for the block. Leaves are held in any case.
    """
    return value.kind != "result" or after_bytes > before_bytes


def _outermost(blocks: Sequence[Block]) -> tuple[Block, ...]:
    names = {block.name for block in blocks}

    def inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:depth]) in names for depth in range(1, len(parts)))

    return tuple(block for block in blocks if not inside(block.name))


@dataclass(frozen=True)
class OptimizerStates:
    """The states of an optimizer: tensors like each parameter, and a few bytes for each parameter."""

    name: str
    per_entry: int
    per_parameter_bytes: int

    def bytes_for(self, parameter_bytes: int) -> int:
        """Return the bytes of the states of a parameter's shard of so many bytes."""
        return self.per_entry * parameter_bytes + self.per_parameter_bytes


def updated_times(per_entry: int) -> int:
    """Return how often a parameter's bytes are read and written by an update that touches everything once.

    >>> updated_times(2)  # parameter, gradient and two states are read, all but the gradient written
    7
    """
    return 3 + 2 * per_entry


ADAMW = OptimizerStates("adamw", 2, 4)
"""The optimizer of which plans count the states where the user names none."""

# Optimizers that torch's DTensors fail in (Adafactor squares partial norms in place) or round otherwise (Muon iterates
# matrix products in bfloat16). With whole gradients they compute what one device does, and keep whole tensors.
WHOLE_GRADIENTS = (torch.optim.Adafactor, torch.optim.Muon)
_LEFT_OUT = frozenset({"capturable", "fused"})  # these refuse the device of the probe, and keep nothing more


def states_of(given: OptimizerStates | Optimizer | type[Optimizer] | str) -> OptimizerStates:
    """Return the states of an optimizer: ``"adamw"``, a class of torch's, or an optimizer with its settings.

    >>> states_of("sgd"), states_of(torch.optim.Adam)
    (OptimizerStates(name='sgd', per_entry=0, per_parameter_bytes=0), \
OptimizerStates(name='adam', per_entry=2, per_parameter_bytes=4))

    Raises:
        UsageError: where there is no such optimizer, or what it keeps is not split as its parameters are.
    """
    if isinstance(given, OptimizerStates):
        return given
    if isinstance(given, str):
        return _named(given.lower())
    if isinstance(given, Optimizer):
        kind = type(given)
        makers = [partial(kind, **_accepted(kind, {**given.defaults, **group})) for group in given.param_groups]
        return max((_probed(kind, make) for make in makers), key=lambda states: states.per_entry)
    if isinstance(given, type) and issubclass(given, Optimizer):
        return _probed(given, given)
    raise UsageError(f"optimizer is {given!r}; expected a name as 'adamw', a class of torch.optim or an optimizer")


def _known() -> dict[str, type[Optimizer]]:
    classes = (found for found in vars(torch.optim).values() if isinstance(found, type))
    return {found.__name__.lower(): found for found in classes if issubclass(found, Optimizer)}


def _named(name: str) -> OptimizerStates:
    known = _known()
    if name not in known:
        names = ", ".join(sorted(set(known) - {"optimizer"}))
        raise UsageError(f"there is no optimizer {name!r} in torch.optim; the names are {names}")
    return _probed(known[name], known[name])


def _accepted(kind: type[Optimizer], settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings that the class takes: its groups hold others too."""
    taken = set(inspect.signature(kind).parameters) - _LEFT_OUT
    return {name: value for name, value in settings.items() if name in taken and name != "params"}


def _probed(kind: type[Optimizer], make: Callable[[list[nn.Parameter]], Optimizer]) -> OptimizerStates:
    """Return what an optimizer keeps after a step."""
    name = kind.__name__.lower()
    reason = "what it keeps is not split as its parameters are" if issubclass(kind, WHOLE_GRADIENTS) else ""
    kept: list[Tensor] = []
    try:
        if not reason:
            kept = _kept_after_a_step(make)
    except Exception as error:
        reason = f"it makes no step on one parameter: {error}"
    like = sum(tensor.numel() == _ENTRIES for tensor in kept)
    if any(tensor.numel() not in (1, _ENTRIES) for tensor in kept):
        reason = "it keeps tensors of other shapes than its parameters"
    if reason:
        raise UsageError(
            f"what {kind.__name__} keeps for its parameters cannot be counted: {reason}; leave optimizer= out, or name "
            "one that works entry by entry, as optimizer='adamw'"
        )
    return OptimizerStates(name, like, sum(tensor.nbytes for tensor in kept if tensor.numel() == 1))


_ENTRIES = 15


def _kept_after_a_step(make: Callable[[list[nn.Parameter]], Optimizer]) -> list[Tensor]:
    with torch.device("cpu"), torch.enable_grad():
        parameter = nn.Parameter(torch.ones(3, _ENTRIES // 3, dtype=torch.float32, device="cpu"))
        optimizer = make([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
