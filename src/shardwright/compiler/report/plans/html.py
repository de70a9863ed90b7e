"""The page of a plan for a browser: the JSON that it reads, with the time line of a step, and the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardwright.compiler.plan.pipeline.costs import StagedCosts
from shardwright.compiler.plan.pipeline.explained import explainer_of
from shardwright.compiler.plan.pipeline.prices import StagedPrices, prices_of
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware
from shardwright.compiler.plan.pricing.schedule import Action
from shardwright.compiler.plan.timing.prices import Prices
from shardwright.compiler.report.pages.page import page_of, save_page
from shardwright.compiler.report.plans.answers import NOT_ASKED, Answer, answers
from shardwright.compiler.report.plans.summary import PlanSummary, plan_summary
from shardwright.compiler.report.plans.tree import FoldedModule, FoldedOperator, Tree
from shardwright.errors import PlanError

Lane = Literal["computes", "communicates"]


class StepEvent(NamedTuple):
    """Computing or communicating for one operator, in one direction, at a time of the step."""

    backward: bool
    lane: Lane
    operator: str  # its name, "" where none is concerned
    start_s: float
    seconds: float


def events_of(prices: Prices) -> list[StepEvent]:
    """All that computes or communicates, in the order in which it begins; what the optimizer does follows it."""
    found = [
        StepEvent(
            event.work.backward,
            "computes" if event.work.stream == "computing" else "communicates",
            event.work.operator,
            event.start_s,
            event.end_s - event.start_s,
        )
        for event in prices.time_line.events
    ]
    return sorted(found, key=lambda event: event.start_s)


class StageEvent(NamedTuple):
    """An action of a group of ranks of a plan with pipeline stages: forward, backward and so on of a microbatch."""

    kind: str
    stage: int
    microbatch: int
    start_s: float
    seconds: float


def stage_events_of(costs: StagedCosts) -> list[list[StageEvent]]:
    """Return what each group of ranks does, in its order."""

    def event(action: Action) -> StageEvent:
        seconds = costs.seconds[action.stage].of(action.kind)
        return StageEvent(*action, costs.run.ends[action] - seconds, seconds)

    return [list(map(event, row)) for row in costs.table]


MOST_ASKED = 150  # operators that are asked why: to find the next best way of one takes 20 to 200 ms


@dataclass(frozen=True)
class PlanDocument:
    """One graph under one plan or several, the first of which is the plan that the page is about."""

    title: str
    plans: Mapping[str, PlanSummary]
    answers: Mapping[str, Sequence[Answer]]  # the head of the page of each plan
    atoms: Sequence[Mapping[str, int]]  # the axes over which each plan cuts, finer than those that people name
    root: FoldedModule
    operators: Sequence[FoldedOperator]
    whys: Mapping[int, str]  # the place of an operator -> why the first plan does it so; of the longest
    events: Sequence[Sequence[StepEvent]]  # of each plan; none where it has stages
    schedules: Sequence[Sequence[Sequence[StageEvent]]]  # of each plan, of each group of ranks; none without stages
    places: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """As the page reads it. Of the tables of a summary it has no need."""
        return {
            "title": self.title,
            "plans": {
                name: _head(summary) | {"atoms": dict(atoms), "answers": self.answers[name]}
                for (name, summary), atoms in zip(self.plans.items(), self.atoms, strict=True)
            },
            "root": asdict(self.root),
            "operators": [asdict(row) for row in self.operators],
            "whys": self.whys,
            "events": [[self._event(event) for event in events] for events in self.events],
            "schedules": [[list(map(_in_ns, group)) for group in groups] for groups in self.schedules],
        }

    def _event(self, event: StepEvent) -> list[Any]:
        lane = 2 * event.backward + (event.lane == "communicates")
        return [lane, self.places.get(event.operator, -1), round(event.start_s * 1e9), round(event.seconds * 1e9)]


def document_of(title: str, plans: Mapping[str, Plan], hardware: Hardware, what_if: str = NOT_ASKED) -> PlanDocument:
    """All that is shown of plans of one graph, at the prices of ``hardware``; ``plans`` by name.

    ``what_if`` is what more hardware would change for the first plan.
    """
    prices = [prices_of(plan, hardware) for plan in plans.values()]
    summaries = {
        name: plan_summary(plan, hardware, known) for (name, plan), known in zip(plans.items(), prices, strict=True)
    }
    first = next(iter(plans))
    tree = Tree(list(plans.values()), prices)
    return PlanDocument(
        title,
        summaries,
        {name: answers(plan, summaries[name], what_if if name == first else "") for name, plan in plans.items()},
        [dict(plan.sharers.sizes) for plan in plans.values()],
        tree.root,
        tree.operators,
        _whys(next(iter(plans.values())), hardware, tree.operators),
        [[] if isinstance(price, StagedPrices) else events_of(price) for price in prices],
        [stage_events_of(price.of_stages) if isinstance(price, StagedPrices) else [] for price in prices],
        tree.places,
    )


def _whys(plan: Plan, hardware: Hardware, operators: Sequence[FoldedOperator]) -> dict[int, str]:
    why = explainer_of(plan, hardware)
    spent = {place: row.ways[0].computes_s + row.ways[0].communicates_s for place, row in enumerate(operators)}
    longest = sorted(spent, key=lambda place: -spent[place])[:MOST_ASKED]
    return {place: why.reasons(why.nodes[operators[place].name]) for place in longest}


def _in_ns(event: StageEvent) -> list[Any]:
    return [*event[:3], round(event.start_s * 1e9), round(event.seconds * 1e9)]


def _head(summary: PlanSummary) -> dict[str, Any]:
    return asdict(replace(summary, modules=(), operators=(), collectives=()))


def in_html(document: PlanDocument) -> str:
    """The page, with what it is told inside of it."""
    return page_of("shardwright.compiler.report.plans", document.title, document.to_json())


def save_html(document: PlanDocument, path: str | Path) -> None:
    """Write the page to a file, whole or not at all.

    Raises:
        PlanError: where it cannot be written.
    """
    save_page(in_html(document), Path(path), PlanError)
