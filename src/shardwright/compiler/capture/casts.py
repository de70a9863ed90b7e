"""Equal casts of one value are made once: autocast casts an activation for each of its readers, as for q, k and v.

Gradients stay as they were. Plain PyTorch casts the gradient of each cast back, and sums in the dtype of the value;
through a shared cast autograd would sum in the dtype of the cast, and round each sum to it. So programs give each
reader the shared tensor as a result of its own (`Value.shared`, `kernels.readers_of`), whose gradient is cast back on
its own: one kernel that casts, and one that adds for each other reader, without more memory. Only where a plan moves
the cast, as tensor parallel ones gather it, readers share the moved tensor and its gradient is summed as it is moved.
Parameters are not among these within one autocast region, which casts each of them once, as plain PyTorch does.

No cast is shared between two layers of a model (`layers.0`, `layers.1`): the backward may recompute each of them, and
would be given the cast beside the value itself. Within a layer it is recomputed once and for all readers. A block that
``recompute=`` names inside a layer is given the cast in place of the value, which is smaller. What the program returns
is not shared either: whoever changes it in place is not to change another. Graphs are functional, so that nothing is
written in between.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from shardwright.compiler.capture.ir import Capture, Node, Value
from shardwright.compiler.rules.table import row_of


def with_shared_casts(capture: Capture) -> Capture:
    """Return the capture in which equal casts of a value are one node, whose result is marked as shared."""
    returned = {capture.loss, *capture.aux, *capture.mutations.values()}
    first: dict[Hashable, str] = {}  # by all on which a cast depends, and by its layer
    same: dict[str, str] = {}  # results of casts that are left out -> that of the one that is made
    nodes: list[Node] = []
    for node in capture.nodes:
        node = replace(node, operands=tuple(same.get(name, name) for name in node.operands))
        if row_of(node.op).casts and node.pin is None and returned.isdisjoint(node.results):
            [name] = node.results
            key = node.call, node.operands, layer_of(node.scope), capture.values[name].needs_gradient
            if (made := first.setdefault(key, name)) != name:
                same[name] = made
                continue
        nodes.append(node)
    shared = frozenset(same.values())
    values = {
        name: replace(value, shared=True) if name in shared else value
        for name, value in capture.values.items()
        if name not in same
    }
    return replace(capture, values=values, nodes=tuple(nodes)) if same else capture


def layer_of(scope: str) -> str:
    """Return the path of the layer of a model in which a module is, as far as its name tells, else nothing.

    >>> layer_of("decoder.layers.3.attention.q"), layer_of("head")
    ('decoder.layers.3', '')
    """
    parts = scope.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])


def widens_back(value: Value, source: Value) -> bool:
    """Return whether the gradient of each reader of a shared cast is to be cast back on its own."""
    narrower = value.dtype.itemsize < source.dtype.itemsize
    return value.shared and value.needs_gradient and narrower and value.dtype.is_floating_point
