"""What flows through the graph of a plan with microbatches: where stages may be cut, and what may not go over them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.mesh.mesh import MICROBATCHES, PIPELINE, Stages
from shardwright.compiler.plan.decisions import Transfer
from shardwright.compiler.plan.device_memory import bytes_behind
from shardwright.compiler.plan.pipeline.costs import MicrobatchCosts
from shardwright.compiler.plan.pipeline.cut import cut, improved, slowest
from shardwright.compiler.plan.pipeline.fitting import Limits
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.schedule import (
    Floats,
    Turn,
    least_seconds,
    schedule,
    seconds_of_cuts,
    turns,
)
from shardwright.errors import PlanError

_NOTICED = 0.01  # of what a stage takes: messages that may be waited for
_EQUAL = 1e-9  # of the time: rounding
_MANY = 4  # microbatches to a stage: with as many, the slowest stage decides how long all take


def operators_in_stages(capture: Capture, of_microbatch: Container[str] = ()) -> list[Node]:
    """Return the operators that depend on the batch and on parameters, in order of execution.

    Args:
        of_microbatch: others that are split over microbatches, and so depend on the batch.
    """
    fed = {value.name for value in capture.of_kind("input")}
    weighed = {value.name for value in capture.of_kind("parameter")}
    found = []
    for node in capture.nodes:
        operands = set(node.operands)
        if operands & fed or node.name in of_microbatch:
            fed.update(node.results)
        if operands & weighed:
            weighed.update(node.results)
        if set(node.results) <= fed and set(node.results) <= weighed:
            found.append(node)
    return found


@dataclass(frozen=True)
class Flow:
    """What flows through the graph of a plan: from the batch, and from parameters."""

    plan: Plan

    @property
    def capture(self) -> Capture:
        return self.plan.capture

    @cached_property
    def staged(self) -> list[Node]:
        """The operators that depend on the batch and on parameters, in order of execution: each has one stage.

        Cached, as all of this class: the plan is frozen.
        """
        of_microbatch = {name for name, strategy in self.plan.strategies.items() if MICROBATCHES in strategy.used}
        return operators_in_stages(self.capture, of_microbatch)

    def stages(self, stages: Stages, limits: Limits = ()) -> dict[str, int] | None:
        """Return the stage of each of these operators; None where no cut keeps the limits.

        Stages that wait for their messages are cut elsewhere than those whose messages go beside computing, and those
        that wait for each other's, too, elsewhere again. The cut is taken with which the schedule ends first.

        Raises:
            PlanError: where there are fewer of them than stages.
        """
        both_s, crossing, operators = self._both_s, 2 * self._message_s, len(self.staged)
        if operators < stages.total:
            depend = "1 operator depends" if operators == 1 else f"{operators} operators depend"
            each = f", {stages.each} for each group of ranks, as {stages.schedule} has" if stages.each > 1 else ""
            raise PlanError(
                f"{depend} on the batch and on parameters, which are no {stages.total} stages{each}; choose a smaller "
                f"{PIPELINE}= in mesh={', or schedule=1f1b' if each else ''}"
            )
        first = cut(both_s, crossing, stages.total, limits)
        if first is None:
            return None
        found = [first]
        noticed = crossing[first].max() > _NOTICED * both_s.sum() / stages.total
        if noticed:
            others = [cut(both_s, crossing, stages.total, limits, overlapped=True)]
            others.append(cut(both_s, 2 * crossing, stages.total, limits))
            found += [other for other in others if other]
        table = schedule(stages.schedule, stages.count, stages.microbatches, stages.total)
        line_s = partial(self._line_s, turns(table, stages.total))
        if noticed or stages.microbatches < _MANY * stages.total:
            found = [improved(starts, operators, line_s, limits) for starts in found]
        took_s = line_s(np.array(found))
        starts = found[int((took_s <= took_s.min() * (1 + _EQUAL)).argmax())]  # the first of equals
        of, stage = {}, -1
        for at, node in enumerate(self.staged):
            stage += at in starts
            of[node.name] = stage
        return of

    @property
    def least_s(self) -> float:
        """Seconds before which no cut has ended, in any schedule of as many stages, whatever is recomputed.

        Where messages are waited for, each border adds no less than the shortest message, there and back.
        """
        stages, hardware = self.plan.stages, self.plan.hardware
        assert stages is not None
        assert hardware is not None
        groups, microbatches = stages.count, stages.microbatches
        waits = (0.0 if hardware.receives_early else 1.0) * self._message_s
        both_s = float(self._both_s.sum()) + 2 * float(np.sort(waits[1:])[: groups - 1].sum())
        slowest_s = 0.0
        if stages.each == 1 and groups <= min(microbatches, len(self.staged)):
            own_s = (microbatches - 1) * self._both_s - (groups - 1) * self._seconds[:, 0]
            slowest_s = slowest(own_s, 2 * (microbatches - groups) * waits, groups)
        return least_seconds(both_s, stages.schedule, groups, microbatches, slowest_s)

    def _line_s(self, order: Sequence[Turn], starts: NDArray[np.int64]) -> Floats:
        """Return the seconds in which the microbatches go in an order through stages that begin there, of each row."""
        assert self.plan.hardware is not None
        ends = np.concatenate([starts[:, 1:], np.full((len(starts), 1), len(self.staged))], axis=1)
        forward, backward = np.moveaxis(self._until[ends] - self._until[starts], 2, 0)
        message = np.append(self._message_s, 0.0)[ends]
        on_demand = not self.plan.hardware.receives_early
        return seconds_of_cuts(order, forward.T, backward.T, message.T, on_demand=on_demand)

    @cached_property
    def _until(self) -> Floats:
        """The seconds of the first operators, of none at first, forward and backward. Cached as all of this class."""
        return np.concatenate([np.zeros((1, 2)), np.cumsum(self._seconds, axis=0)])

    @cached_property
    def _both_s(self) -> Floats:
        """The seconds of these operators, forward and backward together. Cached as all of this class."""
        found: Floats = self._seconds.sum(axis=1)
        return found

    @cached_property
    def _seconds(self) -> Floats:
        """The seconds of these operators, each with the redistributions of what it reads: a row for each.

        They are those of the forward and of the backward. Cached as all of this class.
        """
        return np.array([*map(self._costs.with_transfers_s, self.staged)], dtype=float).reshape(-1, 2)

    @cached_property
    def _message_s(self) -> Floats:
        """The seconds that what is made before each operator and read from it on takes to the next stage.

        Cached as all of this class.
        """
        number = {node.name: at for at, node in enumerate(self.staged)}
        sizes, of = np.unique([0, *bytes_behind(self.plan, number, len(number))[:-1]], return_inverse=True)
        return np.array([self._costs.message_s(int(size)) for size in sizes])[of]

    @cached_property
    def _costs(self) -> MicrobatchCosts:
        """The costs of the plan. Cached as all of this class."""
        assert self.plan.hardware is not None
        return MicrobatchCosts(self.plan, self.plan.hardware)

    def refuse(self) -> None:
        """Raise `PlanError` where something else would communicate over microbatches than sums of losses and counts."""
        stages = self.plan.stages
        assert stages is not None
        remedy = "type microbatches=1 (--microbatches 1), with which the whole batch goes through the stages at once"
        if self.capture.checks:
            raise PlanError(
                "the model raises errors for values of its tensors, which is not there yet with stages; leave "
                f"{PIPELINE} out of mesh="
            )
        if stages.microbatches == 1:
            return
        for node in self.capture.nodes:
            forward, backward = self.plan.graph.collectives_inside(
                node, self.plan.strategies[node.name], self.plan.mesh
            )
            if any(MICROBATCHES in collective.axes for collective in (*forward, *backward)):
                raise PlanError(
                    f"{node.op} in {node.scope or 'the loss function'} ({node.source}) computes over the whole batch, "
                    f"of which a pipeline has one of {stages.microbatches} microbatches at a time; {remedy}"
                )
        for transfer in self.plan.transfers:
            moved = (step for step in transfer.steps if MICROBATCHES in step.axes)
            if step := next((step for step in moved if step.kind == "all_to_all"), None):
                raise PlanError(f"{self._described(transfer)} needs {step}, over microbatches; {remedy}")
        names = {node.name for node in self.staged}
        for buffer, new in self.capture.mutations.items():
            maker = self.plan.graph.producers.get(new)
            if maker is not None and maker[0].name in names:
                label = self.capture.values[buffer].label
                raise PlanError(f"the buffer {label} is changed by what each microbatch gives; {remedy}")

    def _described(self, transfer: Transfer) -> str:
        name, index = transfer.consumers[0]
        node = next((node for node in self.capture.nodes if node.name == name), None)
        if node is None:
            return f"the output {self.capture.values[transfer.value].label}"
        return f"operand {index} of {node.op} in {node.scope or 'the loss function'} ({node.source})"
