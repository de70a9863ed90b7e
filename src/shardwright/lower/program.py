"""The local program: what one rank runs, as instructions and as the Python source that they print to.

The source is not a picture of the program but the program: it is compiled and called. Each instruction is one
assignment; its right-hand side calls a torch operator, a kernel, or a redistribution over some axes of the mesh.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwright.graph.ir import Node, Value
from shardwright.mesh.mesh import Mesh
from shardwright.mesh.redistribute import Collective, Step


@dataclass(frozen=True)
class Instruction:
    """One assignment of the program: ``outputs = text``.

    ``reads`` are the variables that ``text`` mentions. An operator has its ``node``; a redistribution its ``value``
    and ``step``; a bucket joins the gradient reductions of several replicated parameters over the same axes:
    ``bucket`` has the value and the step of each. The program begins with "later", in whose backward the gradients of
    all buckets are waited for.
    """

    kind: Literal["operator", "redistribution", "bucket", "later"]
    outputs: tuple[str, ...]
    reads: tuple[str, ...]
    text: str
    node: Node | None = None
    value: Value | None = None
    step: Step | None = None
    bucket: tuple[tuple[Value, Step], ...] = ()
    internal: tuple[tuple[Collective, ...], tuple[Collective, ...]] = ((), ())  # forward and backward, of an operator
    again: int = 0  # how often the backward repeats a redistribution, in place of keeping what it gathers

    @property
    def passes_on(self) -> bool:
        """Whether the outputs are what is read, one by one."""
        return self.kind in ("bucket", "later")

    def steps(self) -> tuple[tuple[Value, Step], ...]:
        """The redistributions that this instruction performs, with the value that each moves."""
        return ((self.value, self.step),) if self.value is not None and self.step is not None else self.bucket

    def collectives(self, mesh: Mesh) -> list[tuple[str, str, Collective]]:
        """What this instruction communicates, as (cause, direction, collective); a bucket's members singly."""
        found = []
        for value, step in self.steps():
            forward, backward = step.collectives(value.shape, value.dtype.itemsize, mesh)
            found += [(value.label, "forward", forward)] if forward else []
            found += [(value.label, "backward", forward)] * self.again if forward else []
            found += [(value.label, "backward", backward)] if backward and value.needs_gradient else []
        if self.node is not None:
            for direction, collectives in zip(("forward", "backward"), self.internal, strict=True):
                found += [(self.node.name, direction, collective) for collective in collectives]
        return found


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

    def collectives(self) -> list[tuple[str, str, Collective]]:
        """Every collective as (cause, direction, collective), those inside buckets singly, in order of the program."""
        return [found for instruction in self.instructions for found in instruction.collectives(self.mesh)]

    @cached_property
    def source(self) -> str:
        """The program as Python."""
        lines = [f'"""The step of rank {self.rank} of {self.mesh.size} on the mesh {self.mesh}."""', ""]
        lines.append("def step(parameters, buffers, inputs, constants, comm, key, device, reduce_gradients):")
        body = [_unpack(names, kind) for kind, names in self._arguments() if names]
        scope = None
        last_reads = self.last_reads()
        for at, instruction in enumerate(self.instructions):
            here = instruction.node.scope if instruction.node is not None else scope
            if here != scope:
                scope = here
                body.append(f"# {scope or 'loss function'}")
            comma = "," if instruction.passes_on and len(instruction.outputs) == 1 else ""
            body.append(f"{', '.join(instruction.outputs)}{comma} = {instruction.text}")
            dead = [
                name for name in dict.fromkeys([*instruction.reads, *instruction.outputs]) if last_reads[name] == at
            ]
            if dead:
                body.append(f"del {', '.join(dead)}")
        loss = self.outputs[self.loss] if self.loss else None
        body.append(f"return {loss}, {self._outputs(self.aux)}, {self._outputs(self.mutations.values())}")
        return "\n".join(lines) + "\n" + textwrap.indent("\n".join(body), "    ") + "\n"

    def _arguments(self) -> list[tuple[str, tuple[str, ...]]]:
        return [
            ("parameters", self.parameters),
            ("buffers", self.buffers),
            ("inputs", self.inputs),
            ("constants", self.constants),
        ]

    def _outputs(self, values: Iterable[str]) -> str:
        return "[" + ", ".join(self.outputs[value] for value in values) + "]"

    def last_reads(self) -> dict[str, int]:
        """Variable -> the instruction after which nothing reads it; outputs are read at the end."""
        last: dict[str, int] = {}
        for at, instruction in enumerate(self.instructions):
            for name in (*instruction.outputs, *instruction.reads):
                last[name] = at
        last.update(dict.fromkeys(self.outputs.values(), len(self.instructions)))
        return last


def _unpack(names: tuple[str, ...], kind: str) -> str:
    return f"{', '.join(names)}{',' if len(names) == 1 else ''} = {kind}"
