"""The captured graph: operators at their semantic level, in order of execution, as one frozen value."""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from shardwright.compiler.capture.tracing.outside.places import Place
from shardwright.compiler.capture.tracing.values.checks import Check
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective, Step
from shardwright.compiler.rules.notation import Operand

ValueKind = Literal["parameter", "buffer", "input", "constant", "result"]
Slices = tuple[int, ...]
Filled = tuple[int, int]
"""An input, by its place among all, and the number that each of its entries is: of a mask of padding 1, or 0."""


# What the program of a rank is written with beside its values, none of which has such a name.
NAMES_OF_PROGRAMS = frozenset({
    "torch", "aten", "ops", "kernels", "draws",
    "all_gather", "local_slice", "reduce_scatter", "all_to_all", "all_reduce", "enter",
    "all_gather_together", "begin_all_gather", "begin_all_gather_together", "reduced_late",
    "step", "parameters", "buffers", "inputs", "constants", "comm", "key", "device", "reduce_gradients", "resharded",
    "later", "guard", "recomputed", "scheduled", "stages", "pipe", "anchor", "loss_of_all", "enough", "float",
    "complex", "slice",
})  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A tensor of the graph.

    ``label`` is what a person calls it: the name of the parameter or buffer, the path of an input within the batch
    (``0``, ``image``, ``1.mask``), or the name of the node that made it. ``needs_gradient`` says that the backward of
    the loss comes to it (`shardwright.compiler.capture.reached`). ``reduced_in`` is the dtype in which its gradient is
    summed over ranks, of parameters and of their casts and views (`shardwright.compiler.capture.reduced`). ``shared``
    says that several equal casts are one (`shardwright.compiler.capture.casts`). ``read_first`` says of parameters, and
    of their casts and views, that their first reader is the operator which reads one before all others, or makes what
    that reads (`shardwright.compiler.capture.read_first`), and ``viewed`` that it is a view of one, or a cast of that.
    """

    name: str
    kind: ValueKind
    label: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    reduced_in: torch.dtype | None = None
    shared: bool = False
    read_first: bool = False
    viewed: bool = False

    @property
    def bytes(self) -> int:
        """The size of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def of_parameter(self) -> bool:
        """Return whether it is a parameter, or a cast or view of one whose gradient can be summed before it."""
        return self.kind == "parameter" or self.reduced_in is not None

    @property
    def begins_early(self) -> bool:
        """Return whether it is gathered early: a parameter, or a cast of one, and no view."""
        return self.of_parameter and not self.viewed

    @property
    def reduced_itemsize(self) -> int:
        """The bytes of an entry of its gradient where that is summed over ranks."""
        return (self.reduced_in or self.dtype).itemsize

    def collectives(self, step: Step, mesh: Mesh) -> tuple[Collective | None, Collective | None]:
        """Return what a step of the redistribution of this value communicates, forward and backward."""
        return step.collectives(self.shape, self.dtype.itemsize, mesh, self.reduced_itemsize)


@dataclass(frozen=True)
class Pin:
    """A user's pin of a node: slices per dim for operands and results; None where nothing is demanded."""

    operands: tuple[Slices | None, ...]
    results: tuple[Slices | None, ...]
    source: str

    def __str__(self) -> str:
        return f"pinned at {self.source}"


@dataclass(frozen=True)
class Node:
    """One operator. ``args`` and ``kwargs`` hold `Operand` where the tensors of ``operands`` go."""

    name: str
    op: str  # "aten.linear.default": torch.ops.aten.linear.default
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[str, ...]  # names of values, in the order in which they appear in the arguments
    results: tuple[str, ...]
    scope: str  # module path, "layers.0.mlp"
    source: str  # innermost frame outside torch, "model.py:41 in forward: x = self.up(x)"
    pin: Pin | None = None

    @cached_property
    def call(self) -> str:
        """Return the operator with its arguments as text, ``aten.sum.dim_IntList (%0, [1]) ()``.

        Nodes have the same text if they compute the same from their operands.

        The arguments themselves would not do as a key: 1, 1.0 and True are equal, and make others of a tensor.
        """
        return f"{self.op} {self.args} {self.kwargs}"


class CaptureKey(NamedTuple):
    """The facts beside the graph on which a capture depends: the kind of step, autocast, and values in the batch."""

    kind: str
    autocast: str = ""
    """The dtype of the autocast around the step, empty without one."""
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join([self.kind, *([f"autocast {self.autocast}"] if self.autocast else []), *self.beside])


@dataclass(frozen=True)
class Capture:
    """A model's training step as a graph: forward and loss.

    ``constants`` are tensors that the model closes over. ``mutations`` maps a buffer's value to the value that it must
    hold after the step. ``outputs`` are the loss, then the tensors of the auxiliary output in the order of
    ``aux_spec`` (a pytree spec; None where the loss function returns the loss alone). ``frozen`` says where the plain
    Python values stand that the step has read, ``outside`` where those constants stand that are no buffers, by name.
    ``aux_with_gradient`` are those of ``aux`` of which plain PyTorch would know a gradient.
    With ``checks`` the last of ``aux``, which ``aux_spec`` does not know, has a count for each that is 0 if it passes.
    ``conditions`` say of which inputs masks of attention would follow if they were filled; the graph holds for batches
    of which the ones in ``filled`` are.
    """

    values: Mapping[str, Value]
    nodes: tuple[Node, ...]
    loss: str
    aux: tuple[str, ...]
    aux_spec: Any
    mutations: Mapping[str, str]
    constants: Mapping[str, torch.Tensor] = field(repr=False)
    tied: Mapping[str, str]  # second name of a tied parameter or buffer -> its first name
    key: CaptureKey
    frozen: tuple[Place, ...] = ()
    outside: Mapping[str, Place] = field(default_factory=dict)
    aux_with_gradient: frozenset[str] = frozenset()
    checks: tuple[Check, ...] = ()
    conditions: frozenset[Filled] = frozenset()
    filled: frozenset[Filled] = frozenset()

    @property
    def returned(self) -> tuple[str, ...]:
        """Return the auxiliary outputs of the loss function, which are all but the counts of checks."""
        return self.aux[:-1] if self.checks else self.aux

    def of_kind(self, kind: ValueKind) -> tuple[Value, ...]:
        """The values of one kind, in order."""
        return self._by_kind.get(kind, ())

    @cached_property
    def _by_kind(self) -> Mapping[str, tuple[Value, ...]]:
        kinds = dict.fromkeys(value.kind for value in self.values.values())
        return {kind: tuple(value for value in self.values.values() if value.kind == kind) for kind in kinds}

    @property
    def rows(self) -> int:
        """Return the rows of the global batch: the first dim of the first input that has one; 0 without any."""
        return next((value.shape[0] for value in self.of_kind("input") if value.shape), 0)

    @cached_property
    def digest(self) -> str:
        """A hash of the content of the graph, equal on every machine."""
        text = hashlib.sha256()
        for value in self.values.values():
            text.update(f"{value}\n".encode())
        for node in self.nodes:
            pin = node.pin and (node.pin.operands, node.pin.results)  # its line may move
            read = node.operands, node.results
            text.update(f"{node.call} {node.name} {read} {node.scope!r} {pin}\n".encode())
        text.update(f"{self.loss} {self.aux} {sorted(self.mutations.items())} {self.key} {self.checks}".encode())
        return text.hexdigest()[:32]

    def __str__(self) -> str:
        leaves = [value for value in self.values.values() if value.kind != "result"]
        lines = [f"{value.kind} %{value.name}: {value.label} {_fact(value)}" for value in leaves]
        for node in self.nodes:
            results = ", ".join(f"%{name} {_fact(self.values[name])}" for name in node.results)
            args = ", ".join([_text(a, node) for a in node.args] + [f"{k}={_text(a, node)}" for k, a in node.kwargs])
            lines.append(f"{results} = {node.op}({args})  # {node.scope} | {node.source}")
        lines.append(f"loss %{self.loss}, aux {', '.join('%' + name for name in self.aux) or 'none'}")
        return "\n".join(lines)


def without_unused(capture: Capture) -> Capture:
    """Return the capture without operators and constants of which nothing reads a result."""
    live = {capture.loss, *capture.aux, *capture.mutations.values()}
    nodes = []
    for node in reversed(capture.nodes):
        if live.intersection(node.results):
            live.update(node.operands)
            nodes.append(node)
    kept = live.union(*(node.results for node in nodes))
    values = {
        name: value
        for name, value in capture.values.items()
        if value.kind in ("parameter", "buffer", "input") or name in kept
    }
    constants = {name: tensor for name, tensor in capture.constants.items() if name in kept}
    return replace(capture, nodes=tuple(reversed(nodes)), values=values, constants=constants)


def _fact(value: Value) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _text(arg: Any, node: Node) -> str:
    if isinstance(arg, Operand):
        return f"%{node.operands[arg.index]}"
    if isinstance(arg, (tuple, list)):
        return f"[{', '.join(_text(a, node) for a in arg)}]"
    return str(arg)


class Names:
    """The names that are taken in a graph: by values, by nodes, and by what the program of a rank has beside them."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*NAMES_OF_PROGRAMS, *taken}

    @classmethod
    def of(cls, capture: Capture) -> Names:
        """Return the names that are taken in a capture."""
        return cls((*capture.values, *(node.name for node in capture.nodes)))

    def unused(self, stem: str) -> str:
        """Return a name of Python that nothing has, and take it."""
        name = stem = re.sub(r"\W", "_", stem)
        if keyword.iskeyword(stem) or not stem.isidentifier():
            name = stem = f"_{stem}"
        count = 0
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name
