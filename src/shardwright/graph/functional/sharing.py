"""Which tensors of a graph may lie in the same memory, as far as a change in place needs to know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node


class Sharing:
    """Learns of the nodes of a graph in order, and of each change in place when it comes."""

    def __init__(self, positions: Mapping[Node, int]) -> None:
        self._positions = positions
        self._tensors: dict[Node, Node] = {}  # a node that gives a tensor once more -> the node that made it
        self._names: dict[Node, list[Node]] = {}  # the other way round
        self._groups: dict[Node, set[Node]] = {}  # made tensor -> all that may share its memory
        self._own: set[Node] = set()  # tensors that begin a memory of their own
        self._changed: set[Node] = set()
        self._items: dict[tuple[Node, object], Node] = {}

    def tensor(self, node: Node) -> Node:
        """The node that made the tensor which ``node`` gives."""
        return self._tensors.get(node, node)

    def fresh(self, node: Node) -> None:
        """``node`` makes tensors in new memory."""
        self._own.add(node)
        self._groups[node] = {node}

    def again(self, node: Node, tensor: Node) -> None:
        """``node`` gives a tensor that is there already, as an operator in place does."""
        tensor = self._tensors[node] = self.tensor(tensor)
        self._names.setdefault(tensor, []).append(node)

    def shares(self, node: Node, *others: Node) -> None:
        """The results of ``node`` may lie in the memory of ``others``."""
        group = {node}.union(*(self._groups[self.tensor(other)] for other in others))
        self._groups.update(dict.fromkeys(group, group))

    def item(self, node: Node) -> None:
        """``node`` is one result of several."""
        source, index = node.args[0], node.args[1]
        assert isinstance(source, Node)
        if source not in self._own:
            self.shares(node, source)
        elif (source, index) in self._items:
            self.again(node, self._items[source, index])
        else:
            self._items[source, index] = node
            self.fresh(node)

    def note_change(self, tensor: Node) -> None:
        """The tensor that ``tensor`` has made is changed in place."""
        self._changed.add(tensor)

    def any_changed(self, nodes: Iterable[Node]) -> bool:
        """Whether what some of ``nodes`` give may lie in memory that was changed."""
        return bool(self._changed) and any(not self._changed.isdisjoint(self._groups[self.tensor(n)]) for n in nodes)

    def is_alone(self, node: Node, at: Node) -> bool:
        """Whether the tensor of ``node`` may be changed at node ``at`` without any other being read afterwards that
        looks into its memory."""
        tensor = self.tensor(node)
        if tensor not in self._own:
            return False
        others = (other for other in self._groups[tensor] if other is not tensor)
        return not any(self._is_used(other, self._positions[at]) for other in others)

    def _is_used(self, node: Node, after: int) -> bool:
        names = node, *self._names.get(node, ())
        return any(self._positions[user] > after for name in names for user in name.users)
