"""The acts of a step under a plan: in which order a device computes and communicates, and what goes on meanwhile.

Programs join the gradients of replicated parameters into buckets, begin to reduce each when its gradients are there,
and wait for them at the end of the backward. Where the hardware prefetches (`Hardware.prefetches`), they also begin the
all-gathers of sharded parameters, and of casts of them, before they are needed: in the forward, as long before as it
takes; in the backward, when it comes to what needs the one before; in a block that is recomputed, not before the block.
Their gradients begin to be reduced and scattered when they are there; each of these is waited for when it is done, or
once no more may be under way. Whatever else is communicated, of activations and inside operators, is waited for at
once.

This is what `shardwright.compiler.lower.early` makes of programs where memory allows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.plan.decisions import Transfer
from shardwright.compiler.plan.pricing.cost import IN_FLIGHT, early_steps
from shardwright.compiler.plan.pricing.joined import EnteringParameter, entering_alike, in_buckets
from shardwright.compiler.plan.pricing.memory import Block, Blocks, local_bytes
from shardwright.compiler.plan.timing.costs import Communication, Costs
from shardwright.compiler.plan.timing.time_line import Act, Begun, Stream, Work, awaits, begins, does, with_prefetch

AHEAD = 2  # parameters that are gathered before their turn, as bytes: so many times those of a layer
NOTHING_S = 1e-12  # what is left of a difference of equal seconds
Moving = tuple[Transfer, Communication]


class StepActs:
    """The acts of forward and backward, from what each operator and each transfer takes."""

    def __init__(self, costs: Costs) -> None:
        self._costs, self._plan = costs, costs.plan
        self._on_the_way: deque[Begun] = deque()
        self._done: set[str] = set()  # blocks that the backward has recomputed

    def all(self) -> list[Act]:
        """Return the acts of a step."""
        return [*self._forward(), *self._backward()]

    # Forward

    def _forward(self) -> list[Act]:
        acts: list[Act] = []
        inside: list[Act] = []  # of the block so far
        before = ""
        for node in self._plan.capture.nodes:
            block = self._plan.block_of.get(node.name, "")
            if block != before:
                acts, inside = [*acts, *with_prefetch(inside, AHEAD * self._most_bytes)], []
            before, coming = block, self._coming[node.name]
            acts += self._all_brought([of for of in coming if self._plan.block_of_transfer(of[0]) != block], node)
            coming = [of for of in coming if self._plan.block_of_transfer(of[0]) == block]
            (inside if block else acts).extend(self._once(node, coming, backward=False))
        acts += with_prefetch(inside, AHEAD * self._most_bytes)
        for moving in self._coming[""]:
            acts += self._brought(moving, "", backward=False)
        return with_prefetch(acts, AHEAD * self._most_bytes)

    def _all_brought(self, coming: Sequence[Moving], node: Node) -> Iterator[Act]:
        for moving in coming:
            yield from self._brought(moving, node.name, backward=False)

    def _once(self, node: Node, coming: Sequence[Moving], *, backward: bool) -> Iterator[Act]:
        """Yield what the forward of an operator takes, and what is brought to it."""
        for moving in coming:
            yield from self._brought(moving, node.name, backward=backward)
        yield from _some("computing", backward, node.name, self._costs.forward_s(node))
        if moved := self._costs.inside.get(node.name):
            yield from _some("communicating", backward, node.name, moved.forward_s)

    def _brought(self, moving: Moving, operator: str, *, backward: bool) -> Iterator[Act]:
        """Yield how a value is brought to its target, once."""
        transfer, moved = moving
        if early_s := moved.early_forward_s:
            yield awaits(Begun(Work("communicating", backward, operator, early_s), self._made_bytes(transfer)))
        yield from _some("communicating", backward, operator, moved.forward_s - early_s)

    def _made_bytes(self, transfer: Transfer) -> int:
        gathered = transfer.steps[early_steps(transfer.steps) - 1].after
        return local_bytes(self._plan.capture.values[transfer.value], gathered, self._plan.mesh)

    @cached_property
    def _coming(self) -> Mapping[str, Sequence[Moving]]:
        """The transfers before each operator, the first that needs them; "" stands for the outputs.

        Cached, as all of this class: the plan is frozen.
        """
        found: dict[str, list[Moving]] = defaultdict(list)
        for transfer, moved in self._costs.moving:
            found[transfer.consumers[0][0]].append((transfer, moved))
        return found

    @cached_property
    def _most_bytes(self) -> int:
        """The bytes of the parameters of a layer that are gathered, or of the largest."""
        sizes = {
            name: [self._made_bytes(transfer) for transfer, moved in coming if moved.early_forward_s]
            for name, coming in self._coming.items()
        }
        layers = self._plan.graph.once(Blocks).repeated() if any(sizes.values()) else ()
        of_layers = (sum(sum(sizes.get(node.name, ())) for node in layer.nodes) for layer in layers)
        return max([0, *of_layers, *(size for each in sizes.values() for size in each)])

    # Backward

    def _backward(self) -> list[Act]:
        acts = [act for moving in reversed(self._coming[""]) for act in self._reduced(moving, "")]
        for node in reversed(self._plan.capture.nodes):
            acts += self._gathered(node)
            if (name := self._plan.block_of.get(node.name)) and name not in self._done:
                self._done.add(name)
                acts += self._recomputed(next(block for block in self._plan.blocks if block.name == name))
            acts += _some("computing", True, node.name, self._costs.backward_s(node))
            if moved := self._costs.inside.get(node.name):
                acts += _some("communicating", True, node.name, moved.gradient_s)
            for moving in reversed(self._coming[node.name]):
                acts += self._reduced(moving, node.name)
        return with_prefetch(acts, self._most_bytes, one_ahead=True)

    def _gathered(self, node: Node) -> Iterator[Act]:
        """Yield what the backward gathers again when it comes to an operator."""
        for moving in self._again[node.name]:
            yield from self._brought(moving, node.name, backward=True)

    @cached_property
    def _again(self) -> Mapping[str, Sequence[Moving]]:
        """What the backward gathers again, by the operator at which it comes to it: the last that reads it.

        What a block reads that is recomputed is needed at the last operator of the block.
        """
        order = {node.name: at for at, node in enumerate(self._plan.capture.nodes)}
        order |= {name: order[block.nodes[-1].name] for block in self._plan.blocks for name in block.names}
        found: dict[str, list[Moving]] = defaultdict(list)
        for transfer, moved in self._costs.moving:
            if self._plan.gathers_again(transfer):
                at = max(order[name] for name, _ in transfer.consumers if name)
                found[self._plan.capture.nodes[at].name].append((transfer, moved))
        return found

    def _recomputed(self, block: Block) -> list[Act]:
        """Return the forward of a block once more."""
        acts: list[Act] = []
        for node in block.nodes:
            coming = [each for each in self._coming[node.name] if self._plan.block_of_transfer(each[0]) == block.name]
            if node.name in self._plan.computed_again:
                acts += self._once(node, coming, backward=True)
            else:
                acts += (act for each in coming for act in self._brought(each, node.name, backward=True))
        return with_prefetch(acts, AHEAD * self._most_bytes)

    def _reduced(self, moving: Moving, operator: str) -> Iterator[Act]:
        """Yield how the gradient of a value is brought back, once the first operator that needs the value has it."""
        transfer, moved = moving
        if moved.in_buckets:
            if bucket := self._buckets.get(id(transfer)):
                yield begins(Begun(Work("communicating", True, operator, bucket)))
            return
        late_s = moved.early_gradient_s if moved.early_forward_s else 0.0
        yield from _some("communicating", True, operator, moved.gradient_s - late_s)
        if late_s:
            late = Begun(Work("communicating", True, operator, late_s), self._made_bytes(transfer))
            self._on_the_way.append(late)
            yield begins(late)
            while len(self._on_the_way) > 1 and self._bytes_on_the_way() > IN_FLIGHT * self._most_bytes:
                yield awaits(self._on_the_way.popleft())

    def _bytes_on_the_way(self) -> int:
        """Return the bytes of the gradients that may be under way."""
        return sum(begun.bytes for begun in self._on_the_way)

    @cached_property
    def _buckets(self) -> Mapping[int, float]:
        """The seconds of each bucket, as programs join gradients, by the identity of the transfer that it waits for."""
        plan, hardware = self._plan, self._costs.hardware
        found = [(transfer, moved) for transfer, moved in self._costs.moving if moved.in_buckets]
        entering = []
        for transfer, _ in found:
            value = plan.capture.values[transfer.value]
            alike = entering_alike(value, transfer.steps[0])
            entering.append(EnteringParameter(value.name, plan.bytes_of(value), alike))
        groups = in_buckets(entering, hardware.buckets.bytes, hardware.buckets.first_bytes)
        return {id(found[members[0]][0]): sum(found[i][1].seconds for i in members) for members in groups}


def _some(stream: Stream, backward: bool, operator: str, seconds: float) -> Iterator[Act]:
    if seconds > NOTHING_S:
        yield does(Work(stream, backward, operator, seconds))
