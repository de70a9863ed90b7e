"""Mixtures of experts that sort rows by expert become one operator, whose experts may be on different devices.

That is how transformers writes Mixtral, Qwen and DeepSeek, and how others do: the experts of each token are flattened
and sorted, rows are taken in that order, a product with a matrix for each expert, an activation, a second product,
weights, rows put back in order, and a sum over the experts of each token. Experts that are written otherwise, as with a
bias or an activation of their own, stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shardwright.compiler.capture.check import check
from shardwright.compiler.capture.ir import Capture, Node, Value, without_unused
from shardwright.compiler.capture.rewriting.makers import Makers
from shardwright.compiler.capture.rewriting.writer import Writer
from shardwright.compiler.rules.row import named_arguments
from shardwright.compiler.rules.table import Column, column, row_of

Part = Literal[
    "sum", "reshape", "index", "mul", "unsqueeze", "product", "halves", "sort", "divide", "count", "running", "swap",
    "inverse", "written", "positions",
]  # fmt: skip
_COUNTS = 4  # bytes, at least, of an element that counts rows; with fewer, a thousand rows are rounded, or wrap
_PART: Column[Part] = column(
    ("sum", "sum"),
    ("reshape", "reshape"),
    ("index.Tensor", "index"),
    ("mul", "mul"),
    ("unsqueeze", "unsqueeze"),
    ("shardwright.grouped_mm transformers::grouped_mm_fallback", "product"),
    ("split chunk", "halves"),
    ("sort", "sort"),
    ("floor_divide", "divide"),
    ("histc", "count"),
    ("cumsum", "running"),
    ("permute transpose t", "swap"),
    ("argsort", "inverse"),
    ("index_put.default", "written"),
    ("arange", "positions"),
)
_ACTIVATION: Column[str] = column(("silu", "silu"), ("gelu", "gelu"), ("relu", "relu"))


def with_experts(capture: Capture) -> Capture:
    """Return the capture in which mixtures of experts are one operator each."""
    spelled, writer = _Spelled(capture), Writer(capture)
    for node in capture.nodes:
        found = spelled.mixture(node)
        if found is None:
            writer.keep(node)
        else:
            found.write(node, writer)
    return check(without_unused(writer.capture()))


@dataclass(frozen=True)
class _Matrices:
    """Matrices of experts: rows are multiplied by those of ``value``, or by its transposed ones."""

    value: Value
    transposed: bool


@dataclass(frozen=True)
class _Inner:
    """What comes of the first product: ``halves``, of which one goes through the activation, or all of it does."""

    product: Node
    activation: str
    halves: bool


@dataclass(frozen=True)
class _Mixture:
    x: Value
    chosen: Value
    weights: Value
    up: _Matrices
    down: _Matrices
    inner: _Inner
    choices: int

    def write(self, node: Node, writer: Writer) -> None:
        """Write the operator in the place of the sum that ends it."""

        def shaped(value: Value, *shape: int) -> Value:
            if value.shape == shape:
                return value
            return writer.emit(node, "aten.reshape.default", (value, shape), shape, value.dtype)

        def columns(matrices: _Matrices) -> Value:
            value = writer.value(matrices.value.name)
            if matrices.transposed:
                return value
            experts, rows, out = value.shape
            return writer.emit(node, "aten.transpose.int", (value, 1, 2), (experts, out, rows), value.dtype)

        tokens, width = self.x.shape
        x = writer.value(self.x.name)
        of_each = tokens, self.choices
        chosen, weights = (shaped(writer.value(v.name), *of_each) for v in (self.chosen, self.weights))
        up, down = columns(self.up), columns(self.down)
        gates = 2 if self.inner.halves else 1
        if x.dtype != up.dtype:
            x = writer.emit(node, "aten._to_copy.default", (x,), x.shape, up.dtype, {"dtype": up.dtype})
        up = shaped(up, up.shape[0], gates, up.shape[1] // gates, width)
        result = writer.replaced(node)
        args = (x, chosen, weights, up, down, self.inner.activation)
        writer.emit(node, "shardwright.experts", args, result.shape, result.dtype)
        writer.name_last(node)


class _Spelled:
    """The mixtures of experts of a graph, each by the operator that makes its result."""

    def __init__(self, capture: Capture) -> None:
        self._values, self._makers = capture.values, Makers(capture)

    def mixture(self, node: Node) -> _Mixture | None:
        """Return the mixture whose last sum a node is, None where it is none."""
        if node.pin is not None or _PART.of(node.op) != "sum":
            return None
        named = _arguments(node)
        if tuple(named.get("dim") or ()) != (1,) or named.get("keepdim") or named.get("dtype"):
            return None
        placed = self._alone(node.operands[0], "reshape")
        unsorted = placed and self._alone(placed.operands[0], "index")
        if placed is None or unsorted is None or len(unsorted.operands) != 2:
            return None
        order = self._inverted(unsorted.operands[1])
        weighted = self._alone(unsorted.operands[0], "mul")
        if order is None or weighted is None or len(weighted.operands) != 2:
            return None
        shape = self._values[placed.results[0]].shape
        if len(shape) != 3 or shape[0] * shape[1] != self._values[order].shape[0]:
            return None
        for rows, weights in (weighted.operands, weighted.operands[::-1]):
            product, factors = self._alone(rows, "product"), self._weights(weights, order)
            if product is not None and factors is not None:
                return self._between(product, factors, order, shape[0], shape[1])
        return None

    def _between(self, product: Node, weights: Value, order: str, tokens: int, choices: int) -> _Mixture | None:
        """Return the mixture whose second product this is, None where what stands before it is something else."""
        inner = self._inner(product.operands[0])
        if inner is None or inner.product.operands[2] != product.operands[2]:
            return None
        up, down = (self._matrices(each.operands[1]) for each in (inner.product, product))
        x = self._rows(inner.product.operands[0], order, choices)
        chosen = self._chosen(order, product.operands[2], self._values[product.operands[1]].shape[0])
        if x is None or chosen is None or len(x.shape) != 2 or x.shape[0] != tokens:
            return None
        return _Mixture(x, chosen, weights, up, down, inner, choices)

    def _inverted(self, name: str) -> str | None:
        """Return the order of which a value is the inverse: by its argsort, or by positions written to it."""
        maker = self._maker(name)
        part = maker and _PART.of(maker.op)
        if maker is None:
            return None
        if part == "inverse":
            return maker.operands[0] if not _arguments(maker).get("descending") else None
        if part != "written" or len(maker.operands) != 3 or _arguments(maker).get("accumulate"):
            return None
        _, order, positions = maker.operands
        counted = self._maker(positions)
        rows = self._values[order].shape
        whole = counted is not None and _PART.of(counted.op) == "positions"
        begins = whole and counted is not None and _arguments(counted)
        if not begins or begins.get("start", 0) != 0 or begins.get("step", 1) != 1:
            return None
        return order if self._values[positions].shape == rows == self._values[maker.operands[0]].shape else None

    def _weights(self, name: str, order: str) -> Value | None:
        """Return the weights, one for each choice, of which a value has those of rows in an order, as a column."""
        column_of = self._alone(name, "unsqueeze")
        if column_of is None or _arguments(column_of)["dim"] not in (-1, 1):
            return None
        taken = self._alone(column_of.operands[0], "index")
        if taken is None or taken.operands[1:] != (order,):
            return None
        return self._flattened(taken.operands[0])

    def _flattened(self, name: str) -> Value | None:
        """Return what a value of one dim was before it was flattened, or the value itself."""
        value, maker = self._values[name], self._maker(name)
        if len(value.shape) != 1:
            return None
        if maker is not None and _PART.of(maker.op) == "reshape":
            before = self._values[maker.operands[0]]
            return before if len(before.shape) == 2 else value
        return value

    def _inner(self, name: str) -> _Inner | None:
        """Return what stands between two products: an activation of all, or of one half times the other."""
        maker = self._makers.for_one_reader(name)
        if maker is None:
            return None
        if activation := _activation(maker):
            product = self._alone(maker.operands[0], "product")
            return None if product is None else _Inner(product, activation, halves=False)
        if _PART.of(maker.op) != "mul" or len(maker.operands) != 2:
            return None
        for activated, factor in (maker.operands, maker.operands[::-1]):
            gate = self._makers.for_one_reader(activated)
            halves = self._alone(factor, "halves")
            activation = None if gate is None else _activation(gate)
            if gate is None or halves is None or not activation:
                continue
            whole = self._values[halves.operands[0]].shape
            if halves.results != (gate.operands[0], factor) or self._values[factor].shape != (whole[0], whole[1] // 2):
                continue
            product = self._alone(halves.operands[0], "product")
            return None if product is None else _Inner(product, activation, halves=True)
        return None

    def _matrices(self, name: str) -> _Matrices:
        maker = self._maker(name)
        if maker is not None and _PART.of(maker.op) == "swap":
            before = self._values[maker.operands[0]]
            shape = self._values[name].shape
            swapped = (before.shape[0], before.shape[2], before.shape[1]) if len(before.shape) == 3 else ()
            if shape == swapped and _swaps_last(maker):
                return _Matrices(before, transposed=True)
        return _Matrices(self._values[name], transposed=False)

    def _rows(self, name: str, order: str, choices: int) -> Value | None:
        """Return the tokens of which a value has, cast or not, a row for each choice, in an order of choices."""
        taken = self._makers.for_one_reader(name)
        while taken is not None and row_of(taken.op).casts and len(taken.operands) == 1:
            taken = self._makers.for_one_reader(taken.operands[0])
        if taken is None or _PART.of(taken.op) != "index" or len(taken.operands) != 2:
            return None
        tokens = self._maker(taken.operands[1])
        if tokens is None or _PART.of(tokens.op) != "divide" or tokens.operands != (order,):
            return None
        return self._values[taken.operands[0]] if _arguments(tokens)["other"] == choices else None

    def _chosen(self, order: str, ends: str, experts: int) -> Value | None:
        """Return the chosen experts that an order sorts, where ``ends`` are the last rows of each expert in it."""
        ordered = self._maker(order)
        if ordered is None or _PART.of(ordered.op) != "sort" or ordered.results[1] != order:
            return None
        named = _arguments(ordered)
        running, counted = self._maker(self._uncast(ends, _COUNTS)), None
        if running is not None and _PART.of(running.op) == "running":
            counted = self._maker(running.operands[0])
        if named.get("descending") or counted is None or _PART.of(counted.op) != "count":
            return None
        bins = _arguments(counted)
        if (bins["bins"], bins["min"], bins["max"]) != (experts, 0, experts - 1) or experts < 2:
            return None
        flat = self._uncast(counted.operands[0])
        if flat not in (ordered.results[0], ordered.operands[0]) or self._values[flat].dtype.is_floating_point:
            return None
        return self._flattened(ordered.operands[0])

    def _uncast(self, name: str, itemsize: int = 1) -> str:
        """Return what a value was before it was cast, from elements of as many bytes, or the value itself."""
        while (cast := self._maker(name)) is not None and row_of(cast.op).casts:
            if self._values[cast.operands[0]].dtype.itemsize < itemsize:
                break
            name = cast.operands[0]
        return name

    def _maker(self, name: str) -> Node | None:
        return self._makers.of(name)

    def _alone(self, name: str, part: Part) -> Node | None:
        """Return the operator of a kind that makes a value which one operator alone reads."""
        maker = self._makers.for_one_reader(name)
        return maker if maker is not None and _PART.of(maker.op) == part else None


def _activation(node: Node) -> str | None:
    name = _ACTIVATION.of(node.op)
    if name == "gelu":
        return "gelu_tanh" if _arguments(node)["approximate"] == "tanh" else "gelu"
    return name


def _swaps_last(node: Node) -> bool:
    named = _arguments(node)
    if "dims" in named:
        return tuple(dim % 3 for dim in named["dims"]) == (0, 2, 1)
    return {named["dim0"] % 3, named["dim1"] % 3} == {1, 2}


def _arguments(node: Node) -> dict[str, Any]:
    return named_arguments(node.op, node.args, dict(node.kwargs))
