"""The prices of a plan with pipeline stages under the names that the prices of other plans have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from shardwright.compiler.capture.ir import Node
from shardwright.compiler.mesh.mesh import MICROBATCHES
from shardwright.compiler.plan.decisions import Transfer
from shardwright.compiler.plan.device_memory import crossing_bytes
from shardwright.compiler.plan.pipeline.costs import StagedCosts
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.memory import local_bytes
from shardwright.compiler.plan.timing.costs import Communication
from shardwright.compiler.plan.timing.prices import Prices


def prices_of(plan: Plan, hardware: Hardware) -> Prices:
    """Return the seconds and bytes of a plan, with pipeline stages or without."""
    return Prices(plan, hardware) if plan.stages is None else StagedPrices(plan, hardware)


class StagedPrices(Prices):
    """The seconds and bytes of a plan with pipeline stages on ``hardware``.

    An operator or a redistribution takes what all its microbatches take on a rank of its stage; gradients are summed
    once. What is computed and communicated in all is that of the busiest group of ranks, which with its waiting for
    microbatches makes a step.
    """

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        super().__init__(plan, hardware)
        self.of_stages, self.planned = StagedCosts(plan, hardware), plan

    def forward_s(self, node: Node) -> float:
        """Return the seconds that an operator computes in the forward of all microbatches."""
        return self._times(node) * super().forward_s(node)

    def backward_s(self, node: Node) -> float:
        """Return the seconds that an operator computes in the backward of all, without what is recomputed."""
        return self._times(node) * super().backward_s(node)

    def _times(self, node: Node) -> int:
        """Return how often an operator runs in a step: once where it depends on parameters alone."""
        of_microbatch = node.name in self.of_stages.cut.of or MICROBATCHES in self.plan.strategies[node.name].used
        return self.of_stages.cut.microbatches if of_microbatch else 1

    def _inside(self, node: Node) -> Communication | None:
        found = super()._inside(node)
        return found and _repeated(found, self._times(node))

    def transferred(self, transfer: Transfer) -> Communication | None:
        """Return the communication of a redistribution among the ranks of a stage; None where there is none."""
        steps = (replace(step, axes=tuple(a for a in step.axes if a != MICROBATCHES)) for step in transfer.steps)
        found = super().transferred(replace(transfer, steps=tuple(step for step in steps if step.axes)))
        if found is None:
            return None
        if self.plan.capture.values[transfer.value].of_parameter:  # gathered once, and kept for all microbatches
            return replace(found, seconds=found.seconds - found.again_s, again_s=0.0)
        return _repeated(found, self.of_stages.cut.microbatches)

    @property
    def busiest(self) -> int:
        """Return the group of ranks that waits least."""
        busy = self.of_stages.run.busy
        return max(range(len(busy)), key=busy.__getitem__)

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """The operators of the busiest group of ranks.

        Cached, as all of this class: the plan and the hardware are frozen.
        """
        cut, nodes = self.of_stages.cut, self.plan.capture.nodes
        return [node for node in nodes if node.name in cut.of and cut.group(cut.of[node.name]) == self.busiest]

    @property
    def communicating_s(self) -> float:
        """Seconds in which the busiest group communicates within its stages, and all exchange parameters."""
        among_s = max(0.0, self.of_stages.run.busy[self.busiest] - self.computing_s)
        return among_s + self.of_stages.exchange_s

    @property
    def waiting_s(self) -> float:
        """Seconds in which the busiest group waits for microbatches, and messages with them."""
        return self.of_stages.line_s - self.of_stages.run.busy[self.busiest]

    @cached_property
    def updating_s(self) -> float:
        """Seconds of the optimizer, where they are most."""
        return self.of_stages.updating_s

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.of_stages.step_s

    @property
    def hidden_s(self) -> float:
        """No seconds: nothing is counted as hidden yet."""
        return 0.0

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device of the group that sends most does in a step."""
        return max(map(self._sent, range(self.of_stages.cut.count)))

    def _sent(self, group: int) -> float:
        cut = self.of_stages.cut
        among = (moved.bytes for moved, groups in self._moved_by if group in groups)
        stages = [stage for stage in range(cut.total) if cut.group(stage) == group]
        crossing = crossing_bytes(self.planned)  # nothing from the last stage
        ahead, back = sum(crossing[stage] for stage in stages), sum(crossing[stage - 1] for stage in stages)
        return sum(among) + cut.microbatches * (ahead + back) + sum(self._exchanged(group))

    @cached_property
    def _moved_by(self) -> list[tuple[Communication, frozenset[int]]]:
        """What is communicated among the ranks of groups, and by which of these."""
        found = [(moved, self._groups([name])) for name, moved in self.inside.items()]
        for transfer, moved in self.moving:
            of_parameter = self.plan.capture.values[transfer.value].of_parameter
            readers = self.plan.read_by_stages[transfer.value] if of_parameter else frozenset[int]()
            found.append((moved, readers or self._groups([name for name, _ in transfer.consumers])))
        return found

    def _groups(self, operators: Sequence[str]) -> frozenset[int]:
        cut = self.of_stages.cut
        stages = [cut.of[name] for name in operators if name in cut.of] or range(cut.total)
        return frozenset(map(cut.group, stages))

    def _exchanged(self, group: int) -> Iterator[float]:
        """Yield the bytes that a group sends of parameters which others compute with, and of gradients to others."""
        plan, ranks = self.planned, self.plan.devices.size // self.of_stages.cut.count
        for name in plan.moved_between_stages:
            value, readers = plan.capture.values[name], plan.read_by_stages[name]
            for other in range(self.of_stages.cut.count):
                pairs = (other in readers and other != group, group in readers and other != group)
                for sends, at in zip(pairs, (group, other), strict=True):  # a part, and back the gradient of theirs
                    if sends and (at == group or value.needs_gradient):
                        yield local_bytes(value, plan.stored[name], plan.devices, at * ranks)


def _repeated(moved: Communication, times: int) -> Communication:
    """Return what is communicated so often."""
    return replace(
        moved,
        collectives=moved.collectives * times,
        bytes=moved.bytes * times,
        seconds=moved.seconds * times,
        forward_s=moved.forward_s * times,
        again_s=moved.again_s * times,
    )
