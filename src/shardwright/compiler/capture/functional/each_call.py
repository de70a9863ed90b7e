"""Each distinct call of a program traced once, in place of the whole program.

`torch_private.run_decompositions` traces every call of a program again, which is half of a capture; and the layers of a
model make the same calls with other tensors. Traced once and copied for each of them, they are the same graph.

A trace of the program calls its operators one after the other. What it records of a call depends on

- the operator, and its arguments that are no tensors: both are in the key;
- what its tensors tell. They have no values, so that is how they lie in memory, their flags, and whether they need a
  gradient: that is in the key, too. An operand is what the traces of the calls before have made, as in a trace of the
  whole, and not what the exporter has noted, which had gradients;
- which of its operands are one tensor. The key numbers them by nodes of the new graph, in which a tensor that a
  decomposition only passes on has no other node (as dropout of nothing);
- torch's modes and settings. They are those of a trace of the whole, for all calls: no operator changes them, and a
  program in which anything else is called is traced in whole;
- what was done to its tensors before. Nothing was: a program with a change in place is traced in whole, also where only
  the trace shows the change, of an operator whose schema does not say it.

Whether operands look into one memory, only changes in place ask. Calls share no more than a trace: each has its own
nodes, so that it draws its own random numbers, with its own annotations.

In one thing the graph of a trace of the whole is another one: where an operator that stays whole returns an operand
itself (``broadcast_tensors``), it takes what reads the operand from there on for a reader of the result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx import traceback as fx_traceback
from torch.fx.node import map_arg

from shardwright.common import signatures, torch_private, trees
from shardwright.compiler.rules.notation import Operand

# What an argument may be that is no tensor: each is told by its text.
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_CALL = "shardwright_call"  # the annotation of operators that are traced of a call, by its number


def each_call(program: ExportedProgram, preserved: Iterable[Any]) -> ExportedProgram | None:
    """Return ``program`` as `torch_private.run_decompositions` does, with another graph.

    Return None where it has to be traced in whole, also to be refused. It is as it was then.
    """
    nodes = list(program.graph.nodes)
    first = nodes[0].meta.get("val")
    if not isinstance(first, torch.Tensor) or not all(map(_is_alone, nodes)):
        return None
    # Cached by all that the trace of a call depends on, as the docstring of this file says, in one program.
    known: dict[Hashable, _Part] = {}
    with torch_private.decomposing(preserved, torch_private.mode_of(first)) as graph_of:
        while (new := _Copied(nodes, known)).missing:  # again where results lie otherwise than the exporter has noted
            parts = _traced(list(new.missing.values()), graph_of)
            if parts is None:
                return None
            known.update(zip(new.missing, parts, strict=True))
    new.graph.eliminate_dead_code(_has_effects)
    signature, results = program.graph_signature, list[Any](new.made[nodes[-1]].args[0])
    named = new.graph.find_nodes(op="placeholder") + results
    for spec, node in zip(signature.input_specs + signature.output_specs, named, strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
    program.graph_module.graph = new.graph
    return program


def _is_alone(node: fx.Node) -> bool:
    """Return whether what a node becomes is known from it and its operands."""
    if node.op == "call_function" and node.target is not operator.getitem:
        if not signatures.is_operator(node.target) or signatures.changes_operands(node.target):
            return False
        if not all(map(_is_known, trees.tree_leaves((node.args, node.kwargs)))):
            return False
    known = node.op in ("placeholder", "call_function", "output")
    return known and all(map(_is_plain, trees.tree_leaves(node.meta.get("val"))))


def _is_known(arg: Any) -> bool:
    """Return whether an argument is a tensor, or told by its text."""
    return isinstance(arg.meta.get("val"), torch.Tensor) if isinstance(arg, fx.Node) else isinstance(arg, _PLAIN)


def _is_plain(val: Any) -> bool:
    """Return whether what an operator gives is a tensor of known size, or nothing."""
    if not isinstance(val, torch.Tensor):
        return val is None
    if not torch_private.is_fake(val) or val.layout is not torch.strided:
        return False
    return all(isinstance(number, int) for number in (*val.shape, *val.stride(), val.storage_offset()))


def _has_effects(node: fx.Node) -> bool:
    """Return whether a node that nothing reads is kept; one that only draws random numbers is not."""
    return node.is_impure() and not (signatures.is_operator(node.target) and signatures.draws(node.target))


@dataclass(frozen=True)
class _Call:
    """A call of an operator, with an `Operand` where one of ``operands`` stands."""

    target: Any
    args: Any
    kwargs: Any
    operands: Sequence[fx.Node]
    needing: Sequence[bool]  # of each operand whether it needs a gradient

    def of(self, tensors: Sequence[Any]) -> Any:
        """Do it with these."""

        def given(leaf: Any) -> Any:
            return tensors[leaf.index] if isinstance(leaf, Operand) else leaf

        args, kwargs = trees.tree_map(given, (self.args, self.kwargs))
        return self.target(*args, **kwargs)


@dataclass(frozen=True)
class _Part:
    """What torch has traced of a call."""

    operands: Sequence[fx.Node]
    nodes: list[fx.Node]
    result: Any
    needing: Collection[fx.Node]  # of the results, those that need a gradient, as views of parameters do


def _traced(calls: Sequence[_Call], graph_of: Callable[..., fx.Graph | None]) -> list[_Part] | None:
    """Return what torch traces of each call, None where one cannot be traced alone."""
    needing: list[list[bool]] = []

    def run(*tensors: torch.Tensor) -> list[Any]:
        given, results = iter(tensors), []
        for number, call in enumerate(calls):
            with fx_traceback.annotate({_CALL: number}):
                results.append(call.of(list(islice(given, len(call.operands)))))
            needing.append([leaf is not None and leaf.requires_grad for leaf in trees.tree_leaves(results[-1])])
        return results

    like = [of.meta["val"] for call in calls for of in call.operands]
    try:
        graph = graph_of(run, like, [needs for call in calls for needs in call.needing])
    except Exception:
        return None  # torch will say why, and at which node, when it comes there with the program
    if graph is None or not all(map(_is_alone, graph.nodes)):
        return None
    given = iter(graph.find_nodes(op="placeholder"))
    results: Any = graph.output_node().args[0]
    parts = [
        _Part(list(islice(given, len(call.operands))), [], result, set(compress(trees.tree_leaves(result), needs)))
        for call, result, needs in zip(calls, results, needing, strict=True)
    ]
    for node in graph.nodes:
        if node.op == "call_function":
            number = (node.meta.get("custom") or {}).get(_CALL)
            if number is None:  # done behind the call, as a write into a part of a new tensor may be
                return None
            parts[number].nodes.append(node)
    return parts


class _Copied:
    """A graph of what is known of the calls of another one; those of which nothing is known stand in it as they are."""

    def __init__(self, nodes: Sequence[fx.Node], known: Mapping[Hashable, _Part]) -> None:
        self.graph = fx.Graph()
        self.made: dict[fx.Node, Any] = {}  # of each node of the other graph: a node, None, or several of these
        self.missing: dict[Hashable, _Call] = {}
        self._known = known
        self._needing: set[fx.Node] = set()
        for node in nodes:
            self.made[node] = self._add(node)

    def _add(self, node: fx.Node) -> Any:
        if node.op == "call_function":
            if node.target is not operator.getitem:
                return self._add_call(node)
            several, index = self.made[node.all_input_nodes[0]], node.args[1]
            if not isinstance(several, fx.Node):
                return several[index]
        made = self.graph.node_copy(node, self.made.__getitem__)
        if node.op == "placeholder" and node.meta["val"].requires_grad:
            self._needing.add(made)
        return made

    def _add_call(self, node: fx.Node) -> Any:
        operands: dict[fx.Node, Operand] = {}

        def operand(of: fx.Node) -> Any:
            return operands.setdefault(self.made[of], Operand(len(operands)))

        args, kwargs = map_arg((node.args, node.kwargs), operand)
        call = _Call(node.target, args, kwargs, list(operands), [of in self._needing for of in operands])
        # An operator of another library may read what is in no key: each of its calls is another one.
        alone = None if call.target.namespace == "aten" else node
        facts = tuple(_facts(of.meta["val"]) for of in operands)
        key = call.target, alone, repr((args, kwargs)), facts, tuple(call.needing)
        if key in self._known:
            return self._copy(self._known[key], operands, node.meta)
        self.missing[key] = call
        return self.graph.node_copy(node, self.made.__getitem__)

    def _copy(self, part: _Part, operands: Iterable[fx.Node], meta: Mapping[str, Any]) -> Any:
        of = dict(zip(part.operands, operands, strict=True))
        for node in part.nodes:
            of[node] = self.graph.node_copy(node, of.__getitem__)
            of[node].meta = {**meta, "val": node.meta.get("val")}
        self._needing.update(of[node] for node in part.needing)
        return map_arg(part.result, of.__getitem__)


def _facts(val: torch.Tensor) -> Hashable:
    """How a tensor without storage lies in memory, and its flags."""
    lies = val.shape, val.stride(), val.storage_offset(), torch_private.storage_of(val).nbytes()
    return type(val), val.dtype, val.device, *lies, val.is_conj(), val.is_neg()
