"""All-gathers of parameters begin early, and the reduce-scatters of their gradients are waited for late.

A program that `begin_early` was given reads

    w2_late, = reduced_late(w2)
    w2_begun = begin_all_gather(w2, comm, dim=0, axes=("dp",), size=64)
    y = aten.linear.default(x, w1_v1)
    w2_v1 = all_gather(w2_late, comm, dim=0, axes=("dp",), size=64, adjoint="reduce_scatter", begun=w2_begun)

Each all-gather begins as late as lets it end in time, if the link does one after the other, by the seconds that the
plan's hardware gives operators and collectives; and at least behind the all-gather before it. Without hardware it
begins there. It never begins between two operators of which no collective is between, so that stretches stay as they
are. The sum of its gradients is begun by its backward, and waited for behind the backward of an all-gather before it:
of the last by which the link has made it, or of the one next to it, where no more is under way than twice what a layer
gathers. What the backward gathers again it begins when it comes to the section behind
(`shardwright.runtime.programs.resharded`).

The order of all that is begun stands in the program, which is alike on all ranks.

Only the first all-gather of parameters as they are stored, or of casts of these, begins early. In a block that the
backward computes again all-gathers begin inside of the block. Where the sum of a gradient goes on into a bucket, as
that of a parameter which is sharded over some axes and replicated over others, the bucket stands before the wait.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwright.compiler.capture.casts import layer_of
from shardwright.compiler.lower.call import COMM, Call, Name
from shardwright.compiler.lower.liveness import peak_of
from shardwright.compiler.lower.program import Instruction, LocalProgram, unused, variables
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.cost import BACKWARD, IN_FLIGHT, Seconds
from shardwright.compiler.rules.table import row_of

# How many all-gathers may be under way before the first of them is waited for, as memory allows: any, down to one.
_AHEAD = (1 << 30, 8, 4, 2, 1)


def begin_early(program: LocalProgram, plan: Plan) -> LocalProgram:
    """Begin all-gathers of parameters as early as they need, and as far as memory allows.

    That is the plan's limit of memory or, without one, what the program takes anyway and three times a layer's
    parameters more: once for what is gathered early, and the rest for gradients that are scattered.
    """
    gathers, regathers = list(_gathers(program)), any(one.regathers for one in program.instructions)
    if not (gathers or regathers):
        return program
    limit_bytes = plan.memory
    if limit_bytes is None:
        limit_bytes = _peak_bytes(plan, program) + (1 + IN_FLIGHT) * _layer_bytes(gathers, program)
    for prefetches, ahead in itertools.product((True, False) if regathers else (False,), _AHEAD):
        found = dataclasses.replace(_Moving(program, plan, gathers, ahead).program(), prefetches=prefetches)
        if _peak_bytes(plan, found) <= limit_bytes:
            return found
    return program


def _peak_bytes(plan: Plan, program: LocalProgram) -> int:
    """Return the peak of rank 0, which holds the most, so that all ranks decide alike."""
    return peak_of(plan, dataclasses.replace(program, rank=0)).bytes


@dataclass(frozen=True)
class _Gather:
    """The all-gather at a place of a program, and the operators that make what it reads of parameters.

    ``stored`` has for variables those from which they differ in the way of their gradients alone: parameters, or casts.
    """

    at: int
    instruction: Instruction
    stored: Mapping[str, str]
    makers: tuple[int, ...]

    @property
    def operands(self) -> tuple[str, ...]:
        """Return the variables of which the parts are gathered."""
        return self.instruction.reads[: len(self.instruction.moves)]

    def collective(self, mesh: Mesh) -> Collective:
        """Return what it communicates forward."""
        moved = [value.collectives(step, mesh)[0] for value, step in self.instruction.moves]
        found = [collective for collective in moved if collective is not None]
        return dataclasses.replace(found[0], bytes=sum(collective.bytes for collective in found))

    @property
    def receivers(self) -> tuple[str, ...]:
        """Return the variables to which its backward gives sums of gradients; none where it sums none."""
        value, step = self.instruction.moves[0]
        if step.adjoint != "reduce_scatter" or not value.needs_gradient:
            return ()
        source = dict(self.instruction.gathering.kwargs).get("source")
        return (source.text,) if isinstance(source, Name) else self.operands


def _gathers(program: LocalProgram) -> Iterator[_Gather]:
    """Return the all-gathers of parameters, and of what casts alone make of them."""
    stored = dict(zip(program.parameters, program.parameters, strict=True))  # -> the variable of the same part
    makers: dict[str, tuple[int, ...]] = dict.fromkeys(program.parameters, ())
    for at, one in enumerate(program.instructions):
        if any(name not in stored for name in one.reads) or not one.reads:
            continue
        if one.passes_on or one.enters:
            for output, read in zip(one.outputs, one.reads, strict=False):
                stored[output], makers[output] = stored[read], makers[stored[read]]
        elif one.node is not None and row_of(one.node.op).casts:
            if stored[one.reads[0]] == one.reads[0] or _gradient_passes_by(one, program):
                stored[one.outputs[0]] = one.outputs[0]
                makers[one.outputs[0]] = (*makers[stored[one.reads[0]]], at)
        elif one.moves and all(step.kind == "all_gather" for _, step in one.moves):
            parts = tuple(stored[name] for name in one.reads[: len(one.moves)])
            needed = tuple(dict.fromkeys(maker for name in parts for maker in makers[name]))
            inside = tuple(maker for maker in needed if program.instructions[maker].block)
            fits = all(program.instructions[maker].block == one.block for maker in inside)
            if fits and program.mesh.extent(one.moves[0][1].axes) > 1:
                yield _Gather(at, one, stored, inside if one.block else needed)


def _gradient_passes_by(cast: Instruction, program: LocalProgram) -> bool:
    """Return whether all that read a cast give its gradient to what was cast."""
    readers = [one for one in program.instructions if cast.outputs[0] in one.reads]
    return all("source" in dict(one.gathering.kwargs) for one in readers)


def _layer_bytes(gathers: Sequence[_Gather], program: LocalProgram) -> int:
    """Return the bytes of the parameters of the largest layer that are gathered, or of the largest all-gather."""
    layers: defaultdict[str, int] = defaultdict(int)
    for gather in gathers:
        size = gather.collective(program.mesh).bytes
        user = next((one.node for one in program.instructions[gather.at :] if one.node is not None), None)
        layer = layer_of(user.scope) if user is not None else ""
        layers[layer or str(gather.at)] += size
    return max(layers.values(), default=0)


class _Moving:
    """The program with the all-gathers begun, no more than ``ahead`` of them before the first is waited for.

    So many sums of gradients, too, are under way at most.
    """

    def __init__(self, program: LocalProgram, plan: Plan, gathers: Sequence[_Gather], ahead: int) -> None:
        self._program, self._instructions, self._ahead = program, program.instructions, ahead
        self._plan, self._gathers = plan, gathers
        self._objective = None if plan.hardware is None else Seconds(plan.hardware, plan.optimizer)
        self._done_s = [0.0, *accumulate(map(self._seconds, self._instructions))]  # what is computed before each
        self._taken = set(program.names)
        # Parameters, and what a bucket at that place makes of them.
        self._given = dict.fromkeys(program.parameters, -1)
        for at, one in enumerate(self._instructions):
            self._given.update(dict.fromkeys(one.outputs, at) if one.kind == "bucket" else {})

    def program(self) -> LocalProgram:
        """Return it."""
        before: defaultdict[int, list[Instruction]] = defaultdict(list)  # what goes before an instruction
        ended: dict[int, Instruction] = {}
        moved: set[int] = set()
        lates: list[dict[str, str]] = []
        for last, gather in zip(self._waited_behind(), self._gathers, strict=True):
            lates.append({})
            receivers = gather.receivers
            if last is not None and receivers and all(name in self._given for name in receivers):
                lates[-1] = {name: self._fresh(f"{name}_late") for name in receivers}
                at, block = self._late_place(last, gather)
                buckets = {self._given[name] for name in receivers if self._given[name] >= at} - moved
                moved |= buckets
                before[at] += [self._instructions[bucket] for bucket in sorted(buckets)]
                call = Call("reduced_late", variables(receivers))
                outputs = tuple(lates[-1].values())
                before[at].append(Instruction("late", outputs, receivers, call, unpacks=True, block=block))
        places = self._places()
        for gather, late in zip(self._gathers, lates, strict=True):
            begun = ""
            if (place := places[gather.at]) is not None:
                begun = self._fresh(f"{gather.instruction.outputs[0]}_begun")
                makers = [maker for maker in gather.makers if maker >= place and maker not in moved]
                moved.update(makers)
                before[place] += [*(self._made(maker, gather) for maker in makers), _begin(gather, begun)]
            if begun or late:
                ended[gather.at] = _ended(gather, late, begun)
        instructions: list[Instruction] = []
        for at, one in enumerate(self._instructions):
            instructions += sorted(before[at], key=lambda each: bool(each.block))  # what stands before a block first
            instructions += [] if at in moved else [ended.get(at, one)]
        return dataclasses.replace(self._program, instructions=tuple(instructions))

    def _made(self, maker: int, gather: _Gather) -> Instruction:
        """Return a cast of the parameter as it is stored."""
        cast = self._instructions[maker]
        return cast.reading(cast.reads[0], gather.stored[cast.reads[0]])

    def _waited_behind(self) -> list[_Gather | None]:
        """Return for each all-gather the one behind whose backward its sums of gradients are waited for; None of one.

        It is the last of those before it by whose backward the link has made all sums so far, one after the other, if
        no more of them are under way there than there may be; else the one next to it.
        """
        gathers, most_bytes = self._gathers, IN_FLIGHT * _layer_bytes(self._gathers, self._program)
        sizes = [gather.collective(self._program.mesh).bytes if gather.receivers else 0 for gather in gathers]
        begin_s = [BACKWARD * (self._done_s[-1] - self._done_s[gather.at]) for gather in gathers]
        found: list[_Gather | None] = []
        end_s = 0.0
        for number in reversed(range(len(gathers))):
            end_s = max(end_s, begin_s[number]) + (self._takes_s(gathers[number]) if sizes[number] else 0.0)
            last, under_way = number - 1, sizes[number] + sizes[number - 1]
            while last > 0 and begin_s[last] < end_s and number - last < self._ahead:
                last, under_way = last - 1, under_way + sizes[last - 1]
                if under_way > most_bytes:
                    last += 1
                    break
            found.append(gathers[last] if number else None)
        return found[::-1]

    def _takes_s(self, gather: _Gather) -> float:
        """Return the seconds of an all-gather, or of the sum of its gradients; none where they are not known."""
        if self._objective is None:
            return 0.0
        return self._objective.collective(gather.collective(self._program.mesh), self._program.mesh)

    def _late_place(self, last: _Gather, gather: _Gather) -> tuple[int, str]:
        """Return before which instruction a gather's sums are waited for, and the block of that place."""
        if last.instruction.block in ("", gather.instruction.block):
            return last.at, last.instruction.block
        return self._first_of(last.instruction.block), ""

    def _first_of(self, block: str) -> int:
        return next(at for at, one in enumerate(self._instructions) if one.block == block)

    def _places(self) -> dict[int, int | None]:
        """Return before which instruction each all-gather begins, by its own place; None where it is at its own."""
        found: dict[int, int | None] = {}
        regions: defaultdict[str, list[_Gather]] = defaultdict(list)
        for gather in self._gathers:
            regions[gather.instruction.block].append(gather)
        for block, gathers in regions.items():
            points, starts = self._points(block), self._latest_starts(gathers)
            least = points[0]
            for number, (gather, start_s) in enumerate(zip(gathers, starts, strict=True)):
                behind = gathers[number - 1].at + 1 if number else gather.at
                first = gathers[number - self._ahead].at + 1 if number >= self._ahead else least
                possible = [point for point in points if max(first, least) <= point <= behind] or [behind]
                in_time = [point for point in possible if self._done_s[point] <= start_s]
                at = in_time[-1] if in_time else possible[0]
                between = self._instructions[at : gather.at]
                useful = any(one.node is not None and i + at not in gather.makers for i, one in enumerate(between))
                found[gather.at] = at if useful else None
                least = at if useful else gather.at + 1  # so that none is under way before one that is waited for
        return found

    def _points(self, block: str) -> list[int]:
        """Return before which instructions all-gathers may begin: behind collectives, and where blocks begin and end.

        Those within a block begin within it, others outside of all.
        """
        first = self._first_of(block) if block else 0
        found = [first]
        for at, (one, following) in enumerate(zip(self._instructions, self._instructions[1:], strict=False)):
            behind = one.block == block == following.block and one.communicates and one.kind != "later"
            if behind or (not block and one.block != following.block):
                found.append(at + 1)
        return found

    def _latest_starts(self, gathers: Sequence[_Gather]) -> list[float]:
        """Return the latest seconds of computing by which each begins and ends in time, before those that follow."""
        found: list[float] = []
        following_s = self._done_s[-1]
        for gather in reversed(gathers):
            following_s = min(self._done_s[gather.at], following_s) - self._takes_s(gather)
            found.append(following_s)
        return found[::-1]

    def _seconds(self, one: Instruction) -> float:
        """Return the seconds of an operator's forward; none where they are not known."""
        if self._objective is None or one.node is None:
            return 0.0
        return self._objective.forward(
            self._plan.graph, one.node, self._plan.strategies[one.node.name], self._plan.mesh
        )

    def _fresh(self, name: str) -> str:
        self._taken.add(name := unused(name, self._taken))
        return name


def _begin(gather: _Gather, begun: str) -> Instruction:
    """Return what begins an all-gather, as a variable of that name."""
    one, call = gather.instruction, gather.instruction.gathering.renamed(lambda name: gather.stored.get(name, name))
    reads = tuple(gather.stored[name] for name in gather.operands)
    if one.kind == "joined":
        comm, axes, _, *parts = call.args
        begins = Call("begin_all_gather_together", (comm, axes, *parts))
    else:
        kwargs = tuple((name, arg) for name, arg in call.kwargs if name not in ("adjoint", "reduced_in", "source"))
        begins = Call("begin_all_gather", (Name(reads[0]), COMM), kwargs)
    return dataclasses.replace(one, kind="begin", outputs=(begun,), reads=reads, call=begins, regathers=0)


def _ended(gather: _Gather, late: Mapping[str, str], begun: str) -> Instruction:
    """Return the all-gather which waits for what was begun, and whose gradients are waited for late."""
    one, inner = gather.instruction, gather.instruction.gathering.renamed(lambda name: late.get(name, name))
    if begun:
        inner = dataclasses.replace(inner, kwargs=(*inner.kwargs, ("begun", Name(begun))))
    call = dataclasses.replace(one.call, args=(inner, *one.call.args[1:])) if one.reshards else inner
    names = [late.get(name, name) for name in one.reads]
    names += [name for name in one.reads if name in call.names()]
    reads = tuple(dict.fromkeys([*names, *([begun] if begun else [])]))
    return dataclasses.replace(one, reads=reads, call=call)
