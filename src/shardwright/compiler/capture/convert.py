"""An exported program -> `Capture`: our values, canonical operators, gradients, pins, and nothing dead."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.node import map_arg

from shardwright.common import signatures, trees
from shardwright.compiler.capture.ir import (
    Capture,
    CaptureKey,
    Names,
    Node,
    Pin,
    Slices,
    Value,
    ValueKind,
    without_unused,
)
from shardwright.compiler.capture.pins import OPERAND_MARKER, RESULT_MARKER
from shardwright.compiler.capture.tracing.attention import backends_of
from shardwright.compiler.capture.tracing.functions import APPLIED, Application
from shardwright.compiler.capture.tracing.in_place import CHANGE_PARAMETERS
from shardwright.compiler.capture.tracing.refusals import FLEX_ATTENTION
from shardwright.compiler.capture.tracing.regions import is_without_gradient
from shardwright.compiler.capture.tracing.sizes.numbers import Numbers
from shardwright.compiler.capture.tracing.sources import source_of
from shardwright.compiler.capture.tracing.trace import Trace
from shardwright.compiler.rules.layers import refuse_drawing
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.register import called, is_function
from shardwright.compiler.rules.row import Identity, Row
from shardwright.compiler.rules.table import Column, column, row_of
from shardwright.errors import CaptureError, StrategyError

Shape = tuple[int, ...]
_MODEL = "model."  # the user's model within the module that is exported
_DROPPED_ARGUMENTS = {"device", "pin_memory", "layout", "non_blocking"}
# Whether an operator's result is its operand, by the column `identity` of its row.
_IDENTITIES: Mapping[Identity, Callable[[Value, torch.dtype, Shape], bool]] = {
    "always": lambda operand, dtype, shape: True,
    "same dtype": lambda operand, dtype, shape: dtype == operand.dtype,
    "same shape": lambda operand, dtype, shape: shape == operand.shape,
    "no gradient": lambda operand, dtype, shape: not operand.needs_gradient,
}
# Operators whose result is what is written over their first operand, in its shape and dtype.
_WRITES_OVER: Column[bool] = column(("copy", True))
# What stands for None among the arguments of an operator.
_BOUNDS: Column[Mapping[str, int]] = column(("slice slice_scatter", {"start": 0, "end": sys.maxsize}))


@dataclass(frozen=True)
class OutputTree:
    """The values that the loss function returned beside the loss, with an `Operand` where a tensor goes."""

    tree: Any

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return what a person calls each tensor, in the order of ``Capture.aux``: "logits", "0.mask"."""
        return tuple(path for path, leaf in trees.tree_flatten(self.tree)[0] if isinstance(leaf, Operand))

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """The auxiliary output with these tensors, given in the order of ``Capture.aux``."""
        return trees.tree_map(lambda leaf: tensors[leaf.index] if isinstance(leaf, Operand) else leaf, self.tree)


def convert(traced: Trace, labels: Sequence[str], key: CaptureKey, *, train: bool, predict: bool) -> Capture:
    """The capture of an exported step whose batch has tensors at ``labels``.

    Raises:
        CaptureError: where the program changes its inputs, or holds an operator that is none.
        StrategyError: where an operator draws random numbers that would differ from rank to rank.
    """
    made = _Converter(traced, train)
    made.add_leaves(labels)
    for node in traced.program.graph.nodes:
        if node.op == "call_function":
            made.add(node)
    return made.finish(key, predict=predict)


class _Converter:
    """Builds a capture node by node."""

    def __init__(self, traced: Trace, train: bool) -> None:
        self.traced = traced
        self.train = train
        self.numbers = Numbers(traced.sizes)
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        self.of_label: dict[str, str] = {}  # parameter or buffer -> its value
        self.names = Names()
        self.made: dict[str, Any] = {}  # fx node -> a value, or one per result
        self.detached: dict[str, str] = {}
        self.marks: dict[str, tuple[Slices, str]] = {}  # fx node -> the pin of whoever takes it next

    # leaves

    def add_leaves(self, labels: Sequence[str]) -> None:
        """Parameters, buffers, inputs and constants."""
        program, model = self.traced.program, self.traced.model
        self._add_state("parameter", model.named_parameters(remove_duplicate=False))
        self._add_state("buffer", model.named_buffers(remove_duplicate=False))
        vals = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
        given = iter(labels)
        for spec in program.graph_signature.input_specs:
            name = getattr(spec.arg, "name", "")
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and str(spec.target).startswith(_MODEL):
                label = str(spec.target).removeprefix(_MODEL)
                self.made[name] = self.of_label[self.tied.get(label, label)]
            elif spec.kind is InputKind.USER_INPUT:
                label = next(given)
                val = vals[name]
                assert isinstance(val, torch.Tensor)
                stem = label if label == "batch" else f"batch_{label}"
                self.made[name] = self._add_value(stem, "input", label, val, needs_gradient=False)
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                tensor = program.constants[str(spec.target)]
                assert isinstance(tensor, torch.Tensor)
                self.made[name] = self._add_value("constant", "constant", str(spec.target), tensor, False)
                self.constants[self.made[name]] = tensor.detach()
            else:
                raise CaptureError(
                    f"the step uses {spec.target}, a {spec.kind.name.lower()}, which a graph cannot keep\n"
                    "Give what it holds as tensors: in the batch, or as buffers of the model."
                )

    def _add_state(self, kind: ValueKind, named: Any) -> None:
        first: dict[int, str] = {}
        for label, tensor in named:
            if first.setdefault(id(tensor), label) != label:
                self.tied[label] = first[id(tensor)]
            else:
                self.of_label[label] = self._add_value(label, kind, label, tensor, self.train and tensor.requires_grad)

    def _add_value(
        self, stem: str, kind: ValueKind, label: str | None, tensor: torch.Tensor, needs_gradient: bool
    ) -> str:
        name = self.names.unused(stem)
        shape, label = self.numbers.shape(tensor), name if label is None else label
        self.values[name] = Value(name, kind, label, shape, tensor.dtype, needs_gradient)
        return name

    # operators

    def add(self, node: fx.Node) -> None:
        """Add one operator of the exported graph, or pass its operand on where it does nothing."""
        if self.numbers.add(node):
            return
        if node.target is operator.getitem:
            source, index = node.args
            self.made[node.name] = self.made[source.name][index]  # type: ignore[union-attr, index]
            if row_of(str(source.target)).broadcasts:  # type: ignore[union-attr]
                self._pass_mark_on(source.args[0][index], node)  # type: ignore[union-attr, index, arg-type]
            return
        called = getattr(node.target, "__name__", node.target)
        if called == "flex_attention":
            raise CaptureError(FLEX_ATTENTION.format(at=f", at {source_of(node)}"))
        if not signatures.is_operator(node.target):
            raise CaptureError(
                f"{called} is not an operator that can be captured, at {source_of(node)}\n"
                "Keep it out of the loss function, or load the model without it."
            )
        op = str(node.target)
        row = row_of(op)
        if row.checks:
            return
        if op in (OPERAND_MARKER, RESULT_MARKER):
            self._pin(op, node)
            return
        if op == APPLIED:
            self._add_function(node)
            return
        self._add_operator(row.written_as or op, row, node)

    def _add_operator(self, op: str, row: Row, node: fx.Node) -> None:
        """Add what the graph has in place of an operator, by what its row says."""
        same = self._written_over(node) if _WRITES_OVER.of(op) else self._same_value(row, node)
        first = node.args[0] if node.args else None
        passes_on = same is not None or row.casts
        if passes_on and isinstance(first, fx.Node) and first.name in self.marks:
            self.marks[node.name] = self.marks[first.name]
        if same is not None:
            self.made[node.name] = self._passed_on(node, same)
            return
        if row.broadcasts:
            self.made[node.name] = [
                self._append(node, op, (tensor, list(self.numbers.shape(val))), {}, [val])[0]
                if self.values[self.made[tensor.name]].shape != self.numbers.shape(val)
                else self.made[tensor.name]
                for tensor, val in zip(node.args[0], node.meta["val"], strict=True)  # type: ignore[arg-type]
            ]
            return
        vals = node.meta["val"]
        several = isinstance(vals, (tuple, list))
        if isinstance(vals, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureError(
                f"the graph would need a number out of a tensor, at {source_of(node)}\n"
                "Keep it a tensor: index with x.index_select(dim, i.reshape(1)), and choose with torch.where."
            )
        tensors = [val for val in vals if isinstance(val, torch.Tensor)] if several else [vals]
        taken = {parameter.name for parameter in signatures.schema_parameters(op)}
        kwargs = {name: arg for name, arg in node.kwargs.items() if name in taken}  # of what is written in its place
        results = iter(self._append(node, op, node.args, kwargs | backends_of(node, op), tensors))
        if several:
            self.made[node.name] = [next(results) if isinstance(val, torch.Tensor) else None for val in vals]
        else:
            self.made[node.name] = next(results)

    def _add_function(self, node: fx.Node) -> None:
        """Add a user's function under the name of its class."""
        operands, application = node.args[0], Application.read(str(node.args[1]))
        args = tuple(operands[arg.index] if isinstance(arg, Operand) else arg for arg in application.args)  # type: ignore[index]
        kwargs = {} if application.autocast is None else {"autocast": application.autocast}
        carrying = [result.carries for result in application.results]
        self.made[node.name] = list(self._append(node, application.op, args, kwargs, node.meta["val"], carrying))

    def _pass_mark_on(self, given: fx.Node, node: fx.Node) -> None:
        """Losses broadcast their operands: a pin on one that already has the shape is for the loss itself."""
        if self.made[given.name] == self.made[node.name] and given.name in self.marks:
            self.marks[node.name] = self.marks[given.name]

    def _written_over(self, node: fx.Node) -> str:
        """Return what is written over a tensor: torch knows no gradient of the operator that does it."""
        over, written = node.args[:2]
        assert isinstance(over, fx.Node)
        assert isinstance(written, fx.Node)
        name: str = self.made[written.name]
        if not is_without_gradient(node) and self.values[self.made[over.name]].needs_gradient:
            return self._append(node, "shardwright.written_over", (over, written), {}, [node.meta["val"]])[0]
        return name

    def _passed_on(self, node: fx.Node, name: str) -> str:
        """Return the value that an operator passes on, without its gradient where gradients are off."""
        return self._detach(node, name) if is_without_gradient(node) else name

    def _same_value(self, row: Row, node: fx.Node) -> str | None:
        """The operand of an operator that only passes it on."""
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        operand = self.made.get(node.args[0].name)
        if not isinstance(operand, str):
            return None
        if row.identity is None:
            return None
        result = node.meta["val"]
        same = _IDENTITIES[row.identity](self.values[operand], result.dtype, self.numbers.shape(result))
        return operand if same else None

    def _pin(self, op: str, node: fx.Node) -> None:
        """Take note of a pin, of who takes this operand next or of who made this result."""
        marked, slices, source = node.args
        assert isinstance(marked, fx.Node)
        name = self.made[node.name] = self.made[marked.name]
        cut = tuple(slices)  # type: ignore[arg-type]
        if op == OPERAND_MARKER:
            self.marks[node.name] = cut, str(source)
            return
        for i, made in enumerate(self.nodes):
            if name in made.results:
                pin = made.pin or Pin((None,) * len(made.operands), (None,) * len(made.results), str(source))
                results = tuple(cut if r == name else old for r, old in zip(made.results, pin.results, strict=True))
                self.nodes[i] = replace(made, pin=replace(pin, results=results))
                return
        raise StrategyError(
            f"the pinned function returns what it was given, pinned at {source}\n"
            "Pin a function that computes something; a value is cut by the pin of the operator that made it."
        )

    def _append(
        self,
        node: fx.Node,
        op: str,
        args: Any,
        kwargs: Any,
        results: Sequence[torch.Tensor],
        carrying: Sequence[bool] | None = None,
    ) -> tuple[str, ...]:
        """Append an operator, and return its results.

        ``carrying`` says which of them have gradients, where the row of the operator does not.
        """
        row = row_of(op)
        operands: list[str] = []
        no_gradient = is_without_gradient(node)

        marks: list[tuple[Slices, str] | None] = []

        def operand(of: fx.Node) -> Any:
            number = self.numbers.of(of)
            if number is not None:
                return number
            name = self.made[of.name]
            marks.append(None if row.casts else self.marks.get(of.name))
            operands.append(self._detach(node, name) if no_gradient else name)
            return Operand(len(operands) - 1)

        if is_function(op):
            args = tuple(operand(arg) if isinstance(arg, fx.Node) else arg for arg in args)
        else:
            args = _with_bounds(op, _plain(map_arg(args, operand)))
        kwargs = {k: _plain(map_arg(v, operand)) for k, v in kwargs.items() if k not in _DROPPED_ARGUMENTS}
        stem = called(op) if is_function(op) else op.split(".")[1]
        flows = self.train and any(self.values[name].needs_gradient for name in operands)
        if carrying is None:
            first = len(results) if row.differentiable is None else row.differentiable
            carrying = [i < first for i in range(len(results))]
        name = stem if len(results) == 1 else self.names.unused(stem)
        names = tuple(
            self._add_value(
                stem if len(results) == 1 else f"{name}_out{i}",
                "result",
                name if len(results) > 1 else None,
                result,
                flows and carrying[i] and (result.dtype.is_floating_point or result.dtype.is_complex),
            )
            for i, result in enumerate(results)
        )
        name = names[0] if len(names) == 1 else name
        sources = [mark[1] for mark in marks if mark]
        pin = Pin(tuple(mark and mark[0] for mark in marks), (None,) * len(names), sources[0]) if sources else None
        self.nodes.append(
            Node(name, op, args, tuple(kwargs.items()), tuple(operands), names, _scope(node), source_of(node), pin)
        )
        return names

    def _detach(self, node: fx.Node, name: str) -> str:
        """The value without its gradient, for a region in which gradients are off."""
        value = self.values[name]
        if not value.needs_gradient:
            return name
        if name not in self.detached:
            like = torch.empty(value.shape, dtype=value.dtype, device="meta")
            result = self._add_value("detach", "result", "detach", like, needs_gradient=False)
            self.nodes.append(
                Node(
                    result, "aten.detach.default", (Operand(0),), (), (name,), (result,), _scope(node), source_of(node)
                )
            )
            self.detached[name] = result
        return self.detached[name]

    # outputs

    def finish(self, key: CaptureKey, *, predict: bool) -> Capture:
        """The capture, without dead operators."""
        program = self.traced.program
        mutations: dict[str, str] = {}
        outputs: list[str] = []
        for spec in program.graph_signature.output_specs:
            made = self.made[spec.arg.name]
            if spec.kind is OutputKind.USER_OUTPUT:
                outputs.append(made)
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                label = str(spec.target).removeprefix(_MODEL)
                mutations[self.of_label[self.tied.get(label, label)]] = made
            else:
                raise _mutation(program, spec)
        loss, aux = ("" if predict else outputs[0]), tuple(outputs[1:])
        aux_tree = trees.tree_map(self.numbers.plain, self.traced.aux)
        tree = OutputTree(aux_tree) if self.traced.returns_aux else None
        if predict and tree is None:
            raise CaptureError(
                "predict gives what the loss function returns beside the loss, and it returns the loss alone\n"
                "Return (loss, outputs) from it."
            )
        nodes, checks = tuple(self.nodes), self.traced.checks
        found = without_unused(
            Capture(self.values, nodes, loss, aux, tree, mutations, self.constants, self.tied, key, checks=checks)
        )
        for node in found.nodes:
            if not row_of(node.op).draws:
                refuse_drawing(node.op, node.source)
        return found


def _plain(arg: Any) -> Any:
    """Arguments as plain values: tuples for lists of any kind."""
    return tuple(_plain(a) for a in arg) if isinstance(arg, (list, tuple)) else arg


def _with_bounds(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the first and last index of a slice in place of None, which torch writes now and then."""
    bounds = _BOUNDS.of(op)
    if bounds is None:
        return args
    names = [parameter.name for parameter in signatures.schema_parameters(op)]
    return tuple(bounds.get(name) if arg is None else arg for name, arg in zip(names, args, strict=False))


def _scope(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [re.sub(r"@\d+$", "", path) for path, _ in stack.values()]
    return (paths[-1] + "." if paths else "").removeprefix(_MODEL).removesuffix(".")


def _mutation(program: torch.export.ExportedProgram, spec: Any) -> CaptureError:
    node = next(node for node in program.graph.nodes if node.name == spec.arg.name)
    if spec.kind is OutputKind.USER_INPUT_MUTATION:
        what, advice = "the batch", "Work on a copy: x = x.clone(), or the operator without the underscore."
    else:
        what = f"the parameter {str(spec.target).removeprefix(_MODEL)}"
        advice = CHANGE_PARAMETERS
    return CaptureError(f"{what} is changed in place, at {source_of(node)}\n{advice}")
