"""What the page of a plan is told, as JSON: the numbers, the tree of modules, the operators, and the time line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwright.compiler.plan.decided.prices import Prices
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.why import Why
from shardwright.compiler.report.plans.step_line import Event, events_of
from shardwright.compiler.report.plans.summary import PlanSummary, plan_summary
from shardwright.compiler.report.plans.tree import FoldedModule, FoldedOperator, Tree

MOST_ASKED = 150  # operators that are asked why: to find the next best way of one takes 20 to 200 ms


@dataclass(frozen=True)
class PlanDocument:
    """One graph under one plan or several, the first of which is the plan that the page is about."""

    title: str
    plans: Mapping[str, PlanSummary]
    atoms: Sequence[Mapping[str, int]]  # the axes over which each plan cuts, finer than those that people name
    root: FoldedModule
    operators: Sequence[FoldedOperator]
    whys: Mapping[int, str]  # the place of an operator -> why the first plan does it so; of the dearest
    events: Sequence[Sequence[Event]]  # of each plan
    places: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """As the page reads it. Of the tables of a summary it has no need."""
        return {
            "title": self.title,
            "plans": {
                name: _head(summary) | {"atoms": dict(atoms)}
                for (name, summary), atoms in zip(self.plans.items(), self.atoms, strict=True)
            },
            "root": asdict(self.root),
            "operators": [asdict(row) for row in self.operators],
            "whys": self.whys,
            "events": [[self._event(event) for event in events] for events in self.events],
        }

    def _event(self, event: Event) -> list[Any]:
        lane = 2 * event.backward + (event.lane == "communicates")
        return [lane, self.places.get(event.operator, -1), round(event.seconds * 1e9)]


def document_of(title: str, plans: Mapping[str, Plan], hardware: Hardware) -> PlanDocument:
    """All that is shown of plans of one graph, at the prices of ``hardware``; ``plans`` by name."""
    prices = [Prices(plan, hardware) for plan in plans.values()]
    tree = Tree(list(plans.values()), prices)
    return PlanDocument(
        title,
        {name: plan_summary(plan, hardware) for name, plan in plans.items()},
        [dict(plan.mesh.sizes) for plan in plans.values()],
        tree.root,
        tree.operators,
        _whys(next(iter(plans.values())), hardware, tree.operators),
        [events_of(plan, price) for plan, price in zip(plans.values(), prices, strict=True)],
        tree.places,
    )


def _whys(plan: Plan, hardware: Hardware, operators: Sequence[FoldedOperator]) -> dict[int, str]:
    why = Why(plan, hardware)
    spent = {place: row.ways[0].computes_s + row.ways[0].communicates_s for place, row in enumerate(operators)}
    dearest = sorted(spent, key=lambda place: -spent[place])[:MOST_ASKED]
    return {place: why.reasons(why.nodes[operators[place].name]) for place in dearest}


def _head(summary: PlanSummary) -> dict[str, Any]:
    return asdict(replace(summary, modules=(), operators=(), collectives=()))
