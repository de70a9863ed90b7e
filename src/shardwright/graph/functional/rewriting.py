"""Makes an exported graph functional: operators in place give new tensors, and composite ones are taken apart.

The exporter does this by tracing a second time, which costs more than the first. Here nodes are replaced one by one,
and only where it is certain that the second trace would give the same; of most models that is the whole graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from shardwright import torch_private
from shardwright.graph.functional import parts
from shardwright.graph.functional.sharing import Sharing
from shardwright.rules.table import Column, column, row_of

aten = torch.ops.aten


class Uncertain(Exception):
    """A graph has something of which only a second trace tells what becomes of it."""


@dataclass(frozen=True)
class Written:
    """Another operator in place of one: the results ``changed`` are new values of operands, by position."""

    operator: Any
    args: tuple[Any, ...]
    changed: Mapping[int, int]

    def result(self, call: fx.Node) -> Any:
        """What it returns in place of ``call``, without values."""
        return parts.result_of(self.operator, call, self.args)


def _batch_norm(call: fx.Node) -> Written:
    args: Any = call.args
    x, weight, bias, mean, variance, training, momentum, eps, _ = args
    if x.meta["val"].device.type != "cpu":  # other devices may have kernels of their own for it
        raise Uncertain
    if not training:
        return Written(
            aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, variance, momentum, eps), {}
        )
    if mean is None and variance is None:
        return Written(aten._native_batch_norm_legit.no_stats, (x, weight, bias, True, momentum, eps), {})
    args = x, weight, bias, mean, variance, True, momentum, eps
    return Written(aten._native_batch_norm_legit_functional.default, args, {3: 3, 4: 4})


@dataclass(frozen=True)
class Parts:
    """A functional graph in place of an operator with these operands: it returns new values of the operands ``changed``
    and then, where it changes none, what the operator returns."""

    graph: fx.Graph
    operands: tuple[fx.Node, ...]
    changed: tuple[fx.Node, ...] = ()


# Views of a part of a tensor, and the operator that puts other values there.
_PUT_BACK: Column[Any] = column(("select", aten.select_scatter.default), ("slice", aten.slice_scatter.default))
# Operators whose schema hides that they change operands, and what a functional graph has in their place.
_FORMS: Column[Callable[[fx.Node], Written]] = column(("batch_norm", _batch_norm))


def rewrite(graph: fx.Graph, changeable: Sequence[fx.Node] = ()) -> list[fx.Node]:
    """Make ``graph`` functional.

    Of its placeholders ``changeable`` may be changed in place. Those that are, are returned; the graph returns their
    values at its end before its other results.

    Raises:
        Uncertain: where that cannot be done here; the graph is as it was.
    """
    decided = _Deciding(graph, changeable)
    now = _Replacing(graph, decided).now
    changed = [node for node in changeable if node in now]
    if changed:
        output: Any = graph.output_node()
        output.args = ([*(_stored(graph, now[node]) for node in changed), *output.args[0]],)
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)
    return changed


def _stored(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """What a buffer is at the end. Torch leaves out the copy into it, if that is the last thing."""
    if value.target is not aten.copy.default:
        return value
    source = value.args[1]
    assert isinstance(source, fx.Node)
    value.replace_all_uses_with(source)
    graph.erase_node(value)
    return source


class _Deciding:
    """What is to be done with each node: nothing, where it stands in none of the dictionaries."""

    def __init__(self, graph: fx.Graph, changeable: Sequence[fx.Node]) -> None:
        self.written: dict[fx.Node, tuple[Written, Any]] = {}  # with what it returns
        self.parts: dict[fx.Node, Parts] = {}
        self.put_back: dict[fx.Node, tuple[Any, fx.Node]] = {}  # what is written, as a part of which view
        self.wholes: dict[fx.Node, fx.Node] = {}
        self.left_out: set[fx.Node] = set()
        self.late: dict[fx.Node, set[fx.Node]] = {}  # of an operator, the operands that are made in front of it
        self._at_once: set[fx.Node] = set()
        nodes = list(graph.nodes)
        self._positions = {node: at for at, node in enumerate(nodes)}
        self._changeable = set(changeable)
        self._changed: list[fx.Node] = []
        self.sharing = Sharing(self._positions)
        for node in nodes:
            self._decide(node)
        if any(not self._at_once.isdisjoint(user.all_input_nodes) for user in self.late):
            raise Uncertain
        returned = {self.sharing.tensor(node) for node in nodes[-1].all_input_nodes}
        if returned.intersection(self._changed).intersection(self._changeable):
            raise Uncertain

    def _decide(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.sharing.fresh(node)
        elif node.op == "call_function":
            if node.target is operator.getitem:
                self.sharing.item(node)
            elif torch_private.is_operator(node.target) and _is_of_tensors(node.meta.get("val")):
                self._decide_operator(node)
            else:
                raise Uncertain
        elif node.op != "output":
            raise Uncertain

    def _decide_operator(self, node: fx.Node) -> None:
        target: Any = node.target
        form = _FORMS.of(str(target))
        if form is not None:
            self._write(node, form(node))
            self.sharing.fresh(node)
        elif torch_private.changes_operands(target):
            self._decide_in_place(node)
        elif parts.is_taken_apart(target):
            graph, _ = _parts(node)
            self.parts[node] = Parts(graph, tuple(node.all_input_nodes))
            self._decide_views(node, node.all_input_nodes, fresh=_is_new(graph), several=_has_views(graph))
        elif not torch_private.is_certain(target) or not _lies_the_same(node):
            raise Uncertain
        else:
            shared = torch_private.shared_operands(target)
            operands = _nodes([node.args[i] for i in shared if i < len(node.args)])
            self._decide_views(node, operands, fresh=not shared, several=False)

    def _decide_views(self, node: fx.Node, operands: Sequence[fx.Node], *, fresh: bool, several: bool) -> None:
        """A view of a tensor that was changed is made again where it is first used, after the operands before it."""
        if self.sharing.any_changed(operands):
            if several:
                raise Uncertain
            if not fresh:
                self._decide_late(node)
        if fresh:
            self.sharing.fresh(node)
        else:
            self.sharing.shares(node, *operands)

    def _decide_late(self, view: fx.Node) -> None:
        """Let a view of a tensor that was changed stand where it is first used, if it does not do so already."""
        first = min(view.users, key=self._positions.__getitem__, default=None)
        if first is not None and _takes_values(first):
            self.late.setdefault(first, set()).add(view)
        elif self._is_used_at_once(view):
            self._at_once.add(view)
        else:
            raise Uncertain

    def _is_used_at_once(self, node: fx.Node) -> bool:
        """Whether nothing uses the result of ``node`` but the operator that follows, itself used at once if a view."""
        following: Any = node.next
        if not node.users:
            return True
        if set(node.users) != {following} or not torch_private.is_operator(following.target):
            return False
        in_place = torch_private.changes_operands(following.target)
        return in_place or not torch_private.shared_operands(following.target) or self._is_used_at_once(following)

    def _decide_in_place(self, node: fx.Node) -> None:
        changed = node.args[0] if node.args else None
        if not isinstance(changed, fx.Node) or not torch_private.is_in_place(node.target):
            raise Uncertain
        if row_of(str(node.target)).identity == "always":
            self.left_out.add(node)
            self.sharing.again(node, changed)
            return
        form = torch_private.functional_form(node.target)
        if form is None:
            self._decide_parts_in_place(node, changed)
            return
        put_back = _PUT_BACK.of(str(changed.target)) if changed.op == "call_function" else None
        if put_back is None:
            new = self._write(node, Written(form, node.args, {0: 0}))
        else:
            new = self._write_part(node, changed, Written(form, node.args, {}), put_back)
        old = changed.meta["val"]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise Uncertain
        self.sharing.again(node, changed)

    def _write_part(self, node: fx.Node, part: fx.Node, written: Written, put_back: Any) -> Any:
        """Change a part of a tensor, of which nothing but the whole is read afterwards."""
        whole = part.args[0]
        assert isinstance(whole, fx.Node)
        if node.users or part.kwargs:
            raise Uncertain
        self._change(node, whole)
        self.put_back[node] = put_back, part
        self.wholes[node] = self.sharing.tensor(whole)
        return self._write(node, written)

    def _decide_parts_in_place(self, node: fx.Node, operand: fx.Node) -> None:
        """Take an operator apart that changes its first operand at most, and returns it."""
        if not torch_private.is_composite(node.target):
            raise Uncertain
        graph, changed = _parts(node)
        if changed:
            self._change(node, operand)
        self.parts[node] = Parts(graph, tuple(node.all_input_nodes), (operand,) if changed else ())
        self.sharing.again(node, operand)

    def _write(self, node: fx.Node, written: Written) -> Any:
        """Let ``written`` stand in place of ``node``; returns what it returns."""
        for at in written.changed.values():
            self._change(node, node.args[at])
        try:
            result = written.result(node)
        except Exception as error:
            raise Uncertain from error
        self.written[node] = written, result
        return result

    def _change(self, node: fx.Node, changed: Any) -> None:
        tensor = self.sharing.tensor(changed)
        if tensor.op == "placeholder" and tensor not in self._changeable:
            raise Uncertain
        if not self.sharing.is_alone(changed, at=node):
            raise Uncertain
        self._changed.append(tensor)
        self.sharing.note_change(tensor)


def _takes_values(node: fx.Node) -> bool:
    """Whether an operator of the graph, which stays one, computes with the values of its operands as they are then."""
    return (
        torch_private.is_operator(node.target)
        and not torch_private.changes_operands(node.target)
        and not torch_private.shared_operands(node.target)
        and not torch_private.is_composite(node.target)
        and _FORMS.of(str(node.target)) is None
    )


def _is_of_tensors(val: Any) -> bool:
    """Whether an operator returns no numbers; those that only check return nothing."""
    return all(
        isinstance(one, torch.Tensor) or one is None for one in (val if isinstance(val, (list, tuple)) else [val])
    )


def _lies_the_same(node: fx.Node) -> bool:
    """Whether the result of an operator has the strides that a second trace would give it, which has no gradients:
    composite operators choose their parts by that, too, and `reshape` its own by the strides."""
    if not torch_private.is_composite(node.target):
        return True
    found, val = parts.result_of(node.target, node, node.args), node.meta["val"]
    return not isinstance(val, torch.Tensor) or found.stride() == val.stride()


def _nodes(args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(args, found.append)
    return found


def _parts(node: fx.Node) -> tuple[fx.Graph, bool]:
    """The parts of a composite operator, functional and taken apart themselves, and whether they change its first
    operand; they return its new value then."""
    in_place = torch_private.changes_operands(node.target)

    def found() -> tuple[fx.Graph, bool] | None:
        try:
            graph = parts.traced(node, returns=not in_place)
            first = [next(iter(graph.nodes))] if in_place else []
            return graph, bool(rewrite(graph, first))
        except Exception:
            return None

    result: tuple[fx.Graph, bool] | None = parts.once("parts of", node, found)
    if result is None:
        raise Uncertain
    return result


def _is_new(graph: fx.Graph) -> bool:
    """Whether all that a functional graph returns lies in new memory."""
    made = [node.args[0] if node.target is operator.getitem else node for node in graph.output_node().all_input_nodes]
    return all(
        isinstance(node, fx.Node) and node.op == "call_function" and not torch_private.shared_operands(node.target)
        for node in made
    )


def _has_views(graph: fx.Graph) -> bool:
    """Whether a functional graph has a view beside other operators."""
    made = [node for node in graph.nodes if torch_private.is_operator(node.target)]
    return len(made) > 1 and any(torch_private.shared_operands(node.target) for node in made)


class _Replacing:
    """Replaces nodes of a graph, in order. ``now`` has what a tensor is after a change, or after a replacement."""

    def __init__(self, graph: fx.Graph, decided: _Deciding) -> None:
        self.now: dict[fx.Node, Any] = {}
        self._graph, self._decided = graph, decided
        self._gone: list[fx.Node] = []
        late = {view for views in decided.late.values() for view in views}
        for node in list(graph.nodes):
            if node not in late:
                views = decided.late.get(node, ())
                for view in [operand for operand in node.all_input_nodes if operand in views]:
                    node.prepend(view)
                    self._replace(view)
                self._replace(node)
        for node in reversed(self._gone):
            graph.erase_node(node)

    def _replace(self, node: fx.Node) -> None:
        decided = self._decided
        self._replace_operands(node)
        args: Any = node.args
        if node in decided.written:
            self._write(node, *decided.written[node])
        elif node in decided.parts:
            self._take_apart(node, decided.parts[node])
        elif node.target is operator.getitem and isinstance(self.now.get(args[0]), list):
            self.now[node] = self.now[args[0]][args[1]]
        elif node not in decided.left_out:
            return
        self._gone.append(node)

    def _replace_operands(self, node: fx.Node) -> None:
        if any(self._current(given) is not given for given in node.all_input_nodes):
            node.args, node.kwargs = map_arg((node.args, node.kwargs), self._current)

    def _current(self, node: fx.Node) -> fx.Node:
        tensor = self._decided.sharing.tensor(node)
        now = self.now.get(tensor, tensor)
        return now if isinstance(now, fx.Node) else node

    def _write(self, node: fx.Node, written: Written, result: Any) -> None:
        """Put ``written`` in front of ``node``."""
        args, kwargs = map_arg((written.args, node.kwargs), self._current)
        with self._graph.inserting_before(node):
            new = self._graph.call_function(written.operator, args, kwargs)
            new.meta = {**node.meta, "val": result}
            made = [new]
            if isinstance(result, (tuple, list)):
                made = [self._graph.call_function(operator.getitem, (new, i)) for i in range(len(result))]
                for item, val in zip(made, result, strict=True):
                    item.meta = {**node.meta, "val": val}
        if node in self._decided.put_back:
            self._put_back(node, new, *self._decided.put_back[node])
            return
        self.now[node] = made[0]
        for result_at, operand_at in written.changed.items():
            self.now[self._decided.sharing.tensor(written.args[operand_at])] = made[result_at]

    def _put_back(self, node: fx.Node, new: fx.Node, operator: Any, view: fx.Node) -> None:
        """Make the whole anew, with the value of ``new`` in place of the part that ``view`` is of it."""
        args: Any = view.args
        whole, *where = args  # the whole as it was before ``node``
        with self._graph.inserting_before(node):
            value = self._graph.call_function(operator, (whole, new, *where))
        value.meta = {**node.meta, "val": whole.meta["val"]}
        self.now[self._decided.wholes[node]] = value

    def _take_apart(self, node: fx.Node, of: Parts) -> None:
        """Copy the parts of ``node`` in front of it."""
        copied: dict[fx.Node, Any] = {}
        given = iter([self._current(operand) for operand in of.operands])
        with self._graph.inserting_before(node):
            for part in of.graph.nodes:
                if part.op == "placeholder":
                    copied[part] = next(given)
                elif part.op != "output":
                    new = copied[part] = self._graph.node_copy(part, lambda n: copied[n])
                    new.meta = {**node.meta, "val": part.meta["val"]}
        result: Any = map_arg(of.graph.output_node().args[0], lambda n: copied[n])
        tensor = self._decided.sharing.tensor
        if of.changed:
            self.now.update(zip(map(tensor, of.changed), result, strict=True))
        elif tensor(node) is node:  # else it is an operand
            self.now[node] = list(result) if isinstance(result, (tuple, list)) else result
