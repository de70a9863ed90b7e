"""The explanation of a module, an operator or a parameter of a plan with pipeline stages.

What the ranks of a stage do was planned as if there were no stages, so that why they do it is told of that plan; here
it is told where a stage begins, and why there are so many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.common.words import in_bytes, in_time
from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.mesh.mesh import MICROBATCHES, PIPELINE, SEARCHED_STAGES
from shardwright.compiler.plan.explain import Explainer
from shardwright.compiler.plan.pipeline.prices import StagedPrices
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.memory import local_bytes


def explained(plan: Plan, name: str, hardware: Hardware) -> str:
    """Explain what a plan, with pipeline stages or without, does with ``name``; as `Plan.explain`."""
    return explainer_of(plan, hardware).answer(name)


def explainer_of(plan: Plan, hardware: Hardware) -> Explainer:
    """Return who answers about a plan, with pipeline stages or without."""
    return Explainer(plan, hardware) if plan.stages is None else StagedExplainer(plan, hardware)


class StagedExplainer(Explainer):
    """Answers about one plan with pipeline stages, whose prices are those of ``hardware``."""

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        self._of_ranks = StagedPrices(plan, hardware)
        super().__init__(plan, hardware, self._of_ranks)
        self._costs, self._cut = self._of_ranks.of_stages, self._of_ranks.of_stages.cut

    def reasons(self, node: Node) -> str:
        """Say in which stage an operator is, what crosses from and to it, and why the stage is cut there."""
        return " ".join([*self._where([node]), *self._crossing(node), self._why_cut(), self._why_so_many()])

    def _where(self, nodes: Sequence[Node]) -> Iterator[str]:
        stages = sorted({self._cut.of[node.name] for node in nodes if node.name in self._cut.of})
        total = self._cut.total
        if not stages:
            yield "It follows from the batch or from parameters alone, so that each stage that needs it computes it."
        elif len(stages) == 1:
            group = self._cut.group(stages[0])
            yield f"It is in stage {stages[0]} of {total}, on the ranks {PIPELINE}={group}."
        else:
            yield f"Its operators are in the stages {', '.join(map(str, stages))} of {total}, which work at once."
        if len(nodes) == 1 and stages:
            yield (
                f"Each of {self._cut.microbatches} microbatches takes {in_time(self._of_microbatch(nodes[0], False))} "
                f"forward and {in_time(self._of_microbatch(nodes[0], True))} backward."
            )

    def _of_microbatch(self, node: Node, backward: bool) -> float:
        """Return the seconds of an operator for a microbatch, what is recomputed in the backward."""
        prices = self._of_ranks
        again_s = prices.forward_s(node) if node.name in self.plan.computed_again else 0.0
        seconds = prices.backward_s(node) + again_s if backward else prices.forward_s(node)
        return seconds / self._cut.microbatches

    def _crossing(self, node: Node) -> Iterator[str]:
        """Yield what comes to an operator from another stage, and what goes to later ones."""
        of, values = self._cut.of, self.plan.capture.values
        for name in dict.fromkeys(node.operands):
            maker = self.plan.graph.producers.get(name)
            if maker and of.get(maker[0].name, of.get(node.name)) != of.get(node.name):
                yield f"It reads {name} of stage {of[maker[0].name]}: {self._message(values[name])}."
        for name in node.results:
            readers = sorted({of[use.node.name] for use in self.plan.graph.uses[name] if use.node.name in of})
            later = [stage for stage in readers if stage > of.get(node.name, stage)]
            if later:
                yield f"Stage {', '.join(map(str, later))} reads its result: {self._message(values[name])}."

    def _message(self, value: Value) -> str:
        size = local_bytes(value, self.plan.layout(value.name), self.plan.mesh)
        back = ", and its gradient goes back" if value.needs_gradient else ""
        return f"{in_bytes(size)} of each microbatch cross{back}"

    def _why_cut(self) -> str:
        stages = self._costs.stages
        slowest = max(range(len(stages)), key=lambda at: stages[at].both_s)
        times = ", ".join(in_time(stage.both_s) for stage in stages)
        fits = " and fits its memory" if self.plan.memory else ""
        return (
            f"Of all cuts it is the one whose slowest stage takes least{fits}, by what operators compute and what "
            f"crosses. For a microbatch stages take {times}, forward and backward with what their ranks send each "
            f"other; for stage {slowest} the others wait."
        )

    def _why_so_many(self) -> str:
        if self.plan.tried:
            return f"Why so many stages: {'; '.join(map(str, self.plan.tried))}."
        return (
            f"There are {self._cut.total} stages since the mesh says {PIPELINE}={self._cut.count}; "
            f"--mesh {SEARCHED_STAGES} looks for the quickest number."
        )

    def _freedom(self) -> str:
        rest = ",".join(f"{axis.name}={axis.size}" for axis in self.plan.mesh.axes if axis.name != MICROBATCHES)
        if not rest:
            return "(A stage has one rank.)"
        return f"(The ranks of a stage share operators as they would without stages; --mesh {rest} --explain says why.)"

    def _why_all(self, nodes: Sequence[Node]) -> Iterator[str]:
        crossing = (f"{node.name}: {text}" for node in nodes for text in self._crossing(node))
        yield from ["why:", *self._where(nodes), *crossing, self._why_cut(), self._why_so_many()]

    def _why_stored(self, value: Value) -> str:
        holder = self._cut.holders.get(value.name)
        readers = sorted(self.plan.read_by_stages[value.name])
        if holder is not None:
            where = f"only the ranks {PIPELINE}={holder} hold it, since no others compute with it"
        elif value.name in self.plan.moved_between_stages:
            groups = ", ".join(f"{PIPELINE}={group}" for group in readers)
            where = f"the ranks {groups} compute with it: it is sharded over {PIPELINE} and exchanged in each step"
        else:
            where = "all ranks hold it"
        return where
