"""The seconds and bytes of the stages of a plan, and the time line on which microbatches go through them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.mesh import MICROBATCHES, PIPELINE, Axis, Mesh
from shardwright.compiler.mesh.redistribute import Collective, Step
from shardwright.compiler.plan.decisions import Transfer
from shardwright.compiler.plan.device_memory import DeviceMemory, crossing_bytes
from shardwright.compiler.plan.pipeline.split_backward import SHARE, with_split_backward
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.memory import local_bytes
from shardwright.compiler.plan.pricing.schedule import Run, StageSeconds, Table, schedule, simulate
from shardwright.compiler.plan.timing.costs import Costs


@dataclass(frozen=True)
class StageCost:
    """What a stage takes for one microbatch.

    ``message_s`` is what its results take to the next stage, and as much their gradients back. ``weights_s`` of the
    backward the schedule does apart.
    """

    modules: tuple[str, ...]
    operators: int
    forward_s: float
    backward_s: float
    message_s: float
    weights_s: float = 0.0

    @property
    def seconds(self) -> StageSeconds:
        """The same, as the schedule is gone through."""
        return StageSeconds(self.forward_s, self.backward_s - self.weights_s, self.message_s, self.weights_s)

    @property
    def both_s(self) -> float:
        """Seconds of a microbatch, forward and backward."""
        return self.forward_s + self.backward_s


class MicrobatchCosts:
    """The seconds that operators and redistributions of a plan take for one microbatch, forward and backward."""

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        self._plan, self._costs = plan, Costs(plan, hardware)

    def operator_s(self, node: Node) -> tuple[float, float]:
        """Return what an operator takes, with its communication."""
        plan = self._plan
        ahead, back = plan.graph.collectives_inside(node, plan.strategies[node.name], plan.mesh)
        forward_s = self._costs.forward_s(node) + sum(map(self._collective_s, ahead))
        again_s = forward_s if node.name in plan.computed_again else 0.0
        return forward_s, self._costs.backward_s(node) + sum(map(self._collective_s, back)) + again_s

    def with_transfers_s(self, node: Node) -> tuple[float, float]:
        """Return what an operator takes, with the redistributions of what it is the first to read."""
        took = [self.operator_s(node), *map(self.transfer_s, self._read_by[node.name])]
        return sum(forward for forward, _ in took), sum(backward for _, backward in took)

    @cached_property
    def _read_by(self) -> Mapping[str, list[Transfer]]:
        """The redistributions by the operator that reads them first. Cached: the plan is frozen."""
        found = defaultdict[str, list[Transfer]](list)
        for transfer in self._plan.transfers:
            found[transfer.consumers[0][0]].append(transfer)
        return found

    def transfer_s(self, transfer: Transfer) -> tuple[float, float]:
        """Return what a redistribution within a stage takes, without what is done once in a step."""
        value = replace(self._plan.capture.values[transfer.value], needs_gradient=transfer.gradient)
        if value.of_parameter:
            return 0.0, 0.0  # once in a step, as `StagedCosts.exchange_s` says
        forward_s = backward_s = 0.0
        for step in transfer.steps:
            forward, backward = value.collectives(_within(step), self._plan.mesh)
            forward_s += self._collective_s(forward) if forward else 0.0
            backward_s += self._collective_s(backward) if backward and value.needs_gradient else 0.0
        return forward_s, backward_s + self._plan.repeats(transfer) * forward_s

    def message_s(self, size: int) -> float:
        """Return what so many bytes take from a stage to the next one."""
        pair = Mesh((Axis(PIPELINE, 2), *self._plan.devices.axes[1:]))
        message = Collective("all_gather", (PIPELINE,), 2 * size)  # in which each of two sends as much
        return self._costs.objective.collective(message, pair) if size else 0.0

    def _collective_s(self, collective: Collective) -> float:
        return self._costs.objective.collective(collective, self._plan.mesh)


class StagedCosts:
    """The seconds and bytes of a plan with stages on ``hardware``."""

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        assert plan.stages is not None
        self.plan, self.hardware, self.cut = plan, hardware, plan.stages
        self._costs, self._of_microbatch = Costs(plan, hardware), MicrobatchCosts(plan, hardware)

    @property
    def step_s(self) -> float:
        """Seconds of a step: all microbatches forward and backward, the exchange of parameters, and their update."""
        return self.line_s + self.exchange_s + self.updating_s + self.hardware.around_s

    @property
    def line_s(self) -> float:
        """Seconds in which the microbatches go through the stages, forward and backward."""
        return self.run.seconds

    @property
    def idle(self) -> float:
        """The share of the time in which the busiest group of ranks waits for microbatches, the bubble."""
        return self.run.idle

    @cached_property
    def run(self) -> Run:
        """The schedule, gone through with the seconds of the stages.

        Cached, as all of this class: the plan and the hardware are frozen.
        """
        return simulate(self.table, self.seconds)

    @cached_property
    def table(self) -> Table:
        """What each group of ranks does, in order."""
        return schedule(self.cut.schedule, self.cut.count, self.cut.microbatches, self.cut.total)

    @cached_property
    def seconds(self) -> list[StageSeconds]:
        """What each stage takes for a microbatch."""
        return [each.seconds._replace(on_demand=not self.hardware.receives_early) for each in self.stages]

    @cached_property
    def stages(self) -> tuple[StageCost, ...]:
        """The cost of each stage."""
        return tuple(map(self._stage, range(self.cut.total)))

    def held(self, group: int) -> DeviceMemory:
        """Return what a rank of a group holds in a step, with all stages of the group."""
        return self.plan.memory_model.of_stage(self.plan, self.plan.optimizer, group)

    def _stage(self, stage: int) -> StageCost:
        nodes = self._of_stages[stage]
        took = [self._of_microbatch.with_transfers_s(node) for node in nodes]
        weights_s = sum(SHARE * self._costs.backward_s(node) for node in nodes if node.name in self._split)
        forward_s, backward_s = (sum(seconds) for seconds in zip(*took, strict=True)) if took else (0.0, 0.0)
        message_s = self._of_microbatch.message_s(self._crossing_bytes[stage])
        modules = tuple(dict.fromkeys(node.scope for node in nodes))
        return StageCost(modules, len(nodes), forward_s, backward_s, message_s, weights_s)

    @cached_property
    def _of_stages(self) -> list[list[Node]]:
        """The operators of each stage."""
        found: list[list[Node]] = [[] for _ in range(self.cut.total)]
        for node in self.plan.capture.nodes:
            if node.name in self.cut.of:
                found[self.cut.of[node.name]].append(node)
        return found

    @cached_property
    def _split(self) -> frozenset[str]:
        return with_split_backward(self.plan)

    def _seconds(self, collective: Collective, mesh: Mesh | None = None) -> float:
        return self._costs.objective.collective(collective, mesh or self.plan.mesh)

    @cached_property
    def _crossing_bytes(self) -> list[int]:
        """What passes from each stage to the next for a microbatch."""
        return crossing_bytes(self.plan)

    @cached_property
    def exchange_s(self) -> float:
        """Seconds of what is done once in a step, before the first microbatch and behind the last one.

        Parameters of several stages are exchanged, those that the ranks of a stage shard are gathered, and gradients
        summed. Of what stages do on their own the slowest one is waited for.
        """
        plan = self.plan
        moved = [plan.capture.values[name] for name in sorted(plan.moved_between_stages)]
        trained = [value for value in moved if value.needs_gradient]
        of_all: Counter[tuple[str, ...]] = Counter()
        for value in plan.capture.of_kind("parameter"):
            if value.needs_gradient and value.name in self._held_by_all:
                of_all[PIPELINE, *_summed_over(plan, value.name)] += local_bytes(
                    value, plan.leaves[value.name], plan.mesh
                )
        own = max(map(self._of_parameters_s, range(self.cut.count)))
        return self._exchanging_s(moved) + self._exchanging_s(trained) + self._summing_s(of_all) + own

    @cached_property
    def _held_by_all(self) -> frozenset[str]:
        """The parameters of which every group has all that a plan without stages has."""
        held = {value.name for value in self.plan.capture.of_kind("parameter")} - self.plan.moved_between_stages
        return frozenset(name for name in held if self.cut.holders.get(name) is None)

    @cached_property
    def _of_parameters(self) -> list[Transfer]:
        """The redistributions of parameters of which not every group has all."""
        values = self.plan.capture.values
        of_parameters = (each for each in self.plan.transfers if values[each.value].of_parameter)
        return [each for each in of_parameters if each.value not in self._held_by_all]

    def _of_parameters_s(self, group: int) -> float:
        """Return what the ranks of a group take to gather their parameters, one by one, and to sum gradients.

        Those of replicated parameters are summed together.
        """
        plan, seconds = self.plan, 0.0
        together: Counter[tuple[str, ...]] = Counter()
        for transfer in self._of_parameters:
            if group not in plan.read_by_stages[transfer.value]:
                continue
            value = replace(plan.capture.values[transfer.value], needs_gradient=transfer.gradient)
            for step in map(_within, transfer.steps):
                forward, backward = value.collectives(step, plan.mesh) if step.axes else (None, None)
                seconds += self._seconds(forward) if forward else 0.0
                if backward and value.needs_gradient and backward.kind == "all_reduce":
                    together[backward.axes] += backward.bytes
                elif backward and value.needs_gradient:
                    seconds += self._seconds(backward)
        return seconds + self._summing_s(together)

    def _exchanging_s(self, moved: Sequence[Value]) -> float:
        """Return what an all-to-all of parameters takes, or of their gradients; the longest message counts."""
        plan, groups = self.plan, range(self.cut.count)
        ranks = plan.devices.size // self.cut.count
        sizes = {
            (value.name, at): local_bytes(value, plan.stored[value.name], plan.devices, at * ranks)
            for value in moved
            for at in groups
        }
        messages = [
            sum(sizes[value.name, at] for value in moved if to in plan.read_by_stages[value.name])
            for at in groups
            for to in groups
            if at != to
        ]
        size = len(groups) * max(messages, default=0)
        return self._seconds(Collective("all_to_all", (PIPELINE,), size), plan.devices) if size else 0.0

    def _summing_s(self, sums: Mapping[tuple[str, ...], int]) -> float:
        return sum(
            self._seconds(Collective("all_reduce", axes, size), self.plan.devices)
            for axes, size in sums.items()
            if axes
        )

    @cached_property
    def updating_s(self) -> float:
        """Seconds of the optimizer, where they are most."""
        plan, prices, took = self.plan, self._costs.objective, [0.0] * self.cut.count
        for value in plan.capture.of_kind("parameter"):
            if not value.needs_gradient:
                continue
            layout, holder = plan.stored[value.name], self.cut.holders.get(value.name)
            held = prices.leaf(value, layout if holder is None else layout.without(PIPELINE), plan.devices)
            empty = replace(value, shape=(0,) * len(value.shape))
            others = held if holder is None else prices.leaf(empty, layout.without(PIPELINE), plan.devices)
            for group in range(self.cut.count):
                took[group] += held if group == holder else others
        return max(took)


def _within(step: Step) -> Step:
    """Return a step over the axes of the ranks alone."""
    return replace(step, axes=tuple(axis for axis in step.axes if axis != MICROBATCHES))


def _summed_over(plan: Plan, name: str) -> tuple[str, ...]:
    """Return the axes of ranks over which the gradient of a parameter is summed."""
    found: set[str] = set()
    for transfer in plan.transfers:
        if transfer.value == name:
            found |= {axis for step in transfer.steps if step.sums_gradient for axis in step.axes}
    return plan.devices.ordered(found - {MICROBATCHES})
