"""The local program: what one rank runs, as instructions and as the Python source that they are written to.

The source is not a picture of the program but the program: it is compiled and called. Each instruction is one
assignment of a call: of a torch operator, of a kernel, or of a redistribution over some axes of the mesh.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.lower.call import Call, Name
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.redistribute import Collective, Step

INDENT = "    "


@dataclass(frozen=True)
class Instruction:
    """One line of the program, ``outputs = call``.

    ``reads`` are variables: the operands of an operator, and those of which another call makes its outputs. An operator
    has its ``node``. All others have ``moves``: what they redistribute, one or, joined, several values. A bucket joins
    the gradient reductions of several replicated parameters over the same axes, as small sums are "joined". The program
    begins with "later", in whose backward the gradients of all buckets are waited for. An all-gather of parameters may
    have a "begin" before it, and a "late", in whose backward the sum of its gradients is waited for; what they move is
    said by the all-gather alone. What is done "in place" has no
    outputs: it ends what operators before it began, which say what it communicates. A cast that is "shared" has a
    result for each of its readers. "pipeline" is what stages do with each other and with
    microbatches. A "stretch" is a function of several operators (`shardwright.runtime.compiled.compiler`).
    """

    kind: Literal[
        "operator", "redistribution", "bucket", "later", "joined", "begin", "late", "in place", "shared", "stretch",
        "pipeline",
    ]  # fmt: skip
    outputs: tuple[str, ...]
    reads: tuple[str, ...]
    call: Call
    node: Node | None = None
    moves: tuple[tuple[Value, Step], ...] = ()
    internal: tuple[tuple[Collective, ...], tuple[Collective, ...]] = ((), ())  # forward and backward, of an operator
    unpacks: bool = False  # whether the call gives a sequence, also of one output
    regathers: int = 0  # how often the backward gathers anew what is resharded after the forward
    block: str = ""  # the module with which the backward computes it again
    recommunicates: bool = False  # whether it then communicates anew what it does forward
    regathered: tuple[
        str, ...
    ] = ()  # variables, of those that are resharded after the forward, that its backward needs

    @property
    def reshards(self) -> bool:
        """Return whether the outputs are resharded after the forward; the last of several steps gathers them anew."""
        return self.call.function in ("resharded", "resharded.together")

    @property
    def gathering(self) -> Call:
        """Return the call that gathers, of an instruction that may reshard after the forward."""
        found: Call = self.call.args[0] if self.reshards else self.call
        return found

    @property
    def enters(self) -> bool:
        """Return whether a replicated value enters split work: the identity forward, an all-reduce backward."""
        return self.kind == "redistribution" and self.moves[0][1].kind == "enter"

    @property
    def communicates(self) -> bool:
        """Return whether it may communicate, forward or backward, at the same place of all ranks' programs."""
        return self.kind not in ("operator", "shared", "stretch") or self.internal != ((), ())

    @property
    def passes_on(self) -> bool:
        """Return whether the outputs are what is read, one by one."""
        return self.kind in ("bucket", "later", "late")

    @property
    def line(self) -> str:
        """The assignment as Python."""
        if not self.outputs:
            return self.call.source
        comma = "," if self.unpacks and len(self.outputs) == 1 else ""
        return f"{', '.join(self.outputs)}{comma} = {self.call.source}"

    def reading(self, old: str, new: str) -> Instruction:
        """Return the instruction with another variable in the place of one that it reads."""

        def changed(name: str) -> str:
            return new if name == old else name

        return dataclasses.replace(self, reads=tuple(map(changed, self.reads)), call=self.call.renamed(changed))

    def collectives(self, mesh: Mesh) -> list[tuple[str, str, Collective]]:
        """Return what this instruction communicates, as (cause, direction, collective); a bucket's members singly."""
        found = []
        for value, step in self.moves if self.kind != "begin" else ():
            forward, backward = value.collectives(step, mesh)
            found += [(value.label, "forward", forward)] if forward else []
            found += [(value.label, "backward", forward)] * (self.regathers + self.recommunicates) if forward else []
            found += [(value.label, "backward", backward)] if backward and value.needs_gradient else []
        if self.node is not None:
            for direction, collectives in zip(("forward", "backward"), self.internal, strict=True):
                found += [(self.node.name, direction, collective) for collective in collectives]
            found += [(self.node.name, "backward", c) for c in self.internal[0] if self.recommunicates]
        return found


@dataclass(frozen=True)
class ProgramBlock:
    """Instructions that the backward runs again: a function beside the step, of what they read and do not make.

    ``run`` is the variable that stands for one run of it.
    """

    function: str
    run: str
    module: str
    instructions: tuple[Instruction, ...]
    changed: frozenset[str]  # buffers, of which a copy is kept as they were

    @property
    def given(self) -> tuple[str, ...]:
        """The variables that the block reads and does not make."""
        return given_to(self.instructions)

    @property
    def call(self) -> str:
        """The line under which the step has the block."""
        given = ", ".join(f"{name}.clone()" if name in self.changed else name for name in self.given)
        return f"with recomputed({self.function}, comm, key, device, [{given}]) as {self.run}:"

    @property
    def source(self) -> str:
        """The function. What follows the last collective is computed as far as the backward needs it."""
        arguments = ("comm", "key", "device", "enough", *self.given)
        communicating = [at for at, i in enumerate(self.instructions, start=1) if i.recommunicates and i.communicates]
        instructions = list(self.instructions)
        instructions.insert(max(communicating, default=0), Instruction("in place", (), (), Call("enough")))
        return function_of(self.function, arguments, instructions, says=f"{self.module}, once more in the backward")


@dataclass(frozen=True)
class LocalProgram:
    """The program of one rank. Argument tuples hold value names in the order in which the program takes them."""

    rank: int
    mesh: Mesh
    instructions: tuple[Instruction, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    outputs: Mapping[str, str]  # value name -> variable in which it leaves the program
    loss: str
    aux: tuple[str, ...]
    mutations: Mapping[str, str]
    prefetches: bool = False  # whether the backward gathers anew what the section needs to which it comes next
    of_stages: tuple[tuple[str, ...], ...] = ()  # axes over which programs of some pipeline stage communicate

    @property
    def groups(self) -> frozenset[tuple[str, ...]]:
        """Return the sets of axes over which ranks communicate, the same on all."""
        return frozenset(self.of_stages or (collective.axes for _, _, collective in self.collectives()))

    def collectives(self) -> list[tuple[str, str, Collective]]:
        """Every collective as (cause, direction, collective), those inside buckets singly, in order of the program."""
        return [found for instruction in self.instructions for found in instruction.collectives(self.mesh)]

    @cached_property
    def names(self) -> set[str]:
        """The variables that instructions make and read."""
        return {name for instruction in self.instructions for name in (*instruction.outputs, *instruction.reads)}

    @cached_property
    def blocks(self) -> dict[str, ProgramBlock]:
        """Return what the backward runs again, by the path of the module."""
        of: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            if instruction.block:
                of.setdefault(instruction.block, []).append(instruction)
        found = {}
        for number, (module, inside) in enumerate(of.items(), start=1):
            function, run = unused(f"block_{number}", self.names), unused(f"block_{number}_run", self.names)
            found[module] = ProgramBlock(function, run, module, tuple(inside), frozenset(self.mutations))
        return found

    @cached_property
    def draws(self) -> bool:
        """Return whether the program draws random numbers: another run of it is then to draw others."""
        return any(instruction.call.draws for instruction in self.instructions)

    @cached_property
    def source(self) -> str:
        """The program as Python."""
        return "".join(f"{line}\n" for line, _ in self.lines) + "".join(f"\n\n{b.source}" for b in self.blocks.values())

    @cached_property
    def lines(self) -> list[tuple[str, Instruction | None]]:
        """The lines of the step, with which `source` begins, and the instruction that stands in each."""
        title = f'"""The step of rank {self.rank} of {self.mesh.size} on the mesh {self.mesh}."""'
        head = "def step(parameters, buffers, inputs, constants, comm, key, device, reduce_gradients):"
        return [(title, None), ("", None), (head, None), *((INDENT + line, one) for line, one in self._body())]

    def _body(self) -> Iterable[tuple[str, Instruction | None]]:
        for kind in ("parameters", "buffers", "inputs", "constants"):
            if names := getattr(self, kind):
                yield f"{', '.join(names)}{',' if len(names) == 1 else ''} = {kind}", None
        last_reads, scope, at = self.last_reads(), None, 0
        gathered = [name for one in self.instructions if one.reshards for name in one.outputs]
        before: list[int] = []  # what the section needs to which the backward comes next
        for section in sections(self.instructions):
            end, block = at + len(section), self.blocks.get(section[0].block)
            needed = sorted({gathered.index(name) for one in section for name in one.regathered})
            if needed:
                yield f"resharded.expect({needed})", None
            for number, instruction in enumerate(section, start=at):
                if instruction.node is not None and instruction.node.scope != scope:
                    scope = instruction.node.scope
                    yield f"# {scope or 'loss function'}", None
                if block and number == at:
                    yield block.call, None
                line, *dead = _assignment(instruction, number, last_reads)
                indent = INDENT if block else ""
                yield indent + line, instruction
                yield from ((indent + line, None) for line in dead)
            left = ", ".join(name for one in section for name in one.outputs if last_reads[name] >= end)
            if block and left:
                yield f"[{left}] = {block.run}.before([{left}])", None
            if needed and left:
                ahead = [number for number in before if number not in needed] if self.prefetches else []
                also = f", {ahead}" if ahead else ""
                yield f"[{left}] = resharded.before({needed}, [{left}]{also})", None
                before = needed
            at = end
        loss = self.outputs[self.loss] if self.loss else None
        yield f"return {loss}, {self._outputs(self.aux)}, {self._outputs(self.mutations.values())}", None

    def _outputs(self, values: Iterable[str]) -> str:
        return "[" + ", ".join(self.outputs[value] for value in values) + "]"

    def last_reads(self) -> dict[str, int]:
        """Variable -> the instruction after which nothing reads it; outputs are read at the end."""
        last = _last_reads(self.instructions)
        last.update(dict.fromkeys(self.outputs.values(), len(self.instructions)))
        return last


def sections(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return the instructions in sections: each block, what stands between blocks and collectives, and these singly."""
    keys = ((one.block, at if one.communicates and not one.block else -1) for at, one in enumerate(instructions))
    grouped = groupby(zip(keys, instructions, strict=True), key=lambda pair: pair[0])
    return [[instruction for _, instruction in pairs] for _, pairs in grouped]


def given_to(instructions: Sequence[Instruction]) -> tuple[str, ...]:
    """Return the variables that instructions read and do not make."""
    made = {name for instruction in instructions for name in instruction.outputs}
    reads = dict.fromkeys(name for instruction in instructions for name in instruction.reads)
    return tuple(name for name in reads if name not in made)


def function_of(
    name: str,
    arguments: Sequence[str],
    instructions: Sequence[Instruction],
    results: Sequence[str] = (),
    says: str = "",
) -> str:
    """Write instructions as a function in Python, which returns some of their variables."""
    last = _last_reads(instructions) | dict.fromkeys(results, len(instructions))
    body = [line for at, instruction in enumerate(instructions) for line in _assignment(instruction, at, last)]
    body += [f"return {', '.join(results)}"] if results else []
    head = f"def {name}({', '.join(arguments)}):" + (f"  # {says}" if says else "")
    return head + "\n" + textwrap.indent("\n".join(body), INDENT) + "\n"


def unused(name: str, taken: Collection[str]) -> str:
    """Return that name, or one like it that is not taken."""
    while name in taken:
        name = f"_{name}"
    return name


def variables(names: Iterable[str]) -> tuple[Name, ...]:
    """Return variables as arguments of a call."""
    return tuple(map(Name, names))


def _last_reads(instructions: Sequence[Instruction]) -> dict[str, int]:
    return {
        name: at for at, instruction in enumerate(instructions) for name in (*instruction.outputs, *instruction.reads)
    }


def _assignment(instruction: Instruction, at: int, last_reads: Mapping[str, int]) -> list[str]:
    """An instruction as Python, and what then nothing reads any more."""
    dead = [name for name in dict.fromkeys([*instruction.reads, *instruction.outputs]) if last_reads[name] == at]
    return [instruction.line, *([f"del {', '.join(dead)}"] if dead else [])]
