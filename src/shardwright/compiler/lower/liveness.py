"""The most that is alive at once while a program and its backward run: a prediction of the peak of a device's memory.

Forward, memory is alive as long as a variable of the program stands for it or an operator keeps it for the backward.
Backward, the operators come in reverse: each makes gradients of its operands from those of its results, and gives back
what it kept. What kernels take for themselves is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.compiler.capture.ir import Node, Value
from shardwright.compiler.lower.program import Instruction, LocalProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.joined import beside_together
from shardwright.compiler.plan.pricing.memory import local_bytes
from shardwright.compiler.plan.timing.alive import PASSES_GRADIENT


@dataclass(frozen=True)
class Peak:
    """The peak of bytes alive, and where it is: the operator, or the value that is redistributed, and the direction."""

    bytes: int
    at: str
    direction: str


def peak_of(plan: Plan, program: LocalProgram) -> Peak:
    """The peak of one step, parameters, states of the optimizer, buffers and inputs included."""
    return _Lives(plan, program).peak()


class _Lives:
    def __init__(self, plan: Plan, program: LocalProgram) -> None:
        self._plan, self._program, self._kept = plan, program, plan.kept
        held = plan.held
        self._always = held.parameters + held.optimizer + held.buffers + held.inputs
        self._peak = Peak(0, "", "forward")
        # Memory is numbered; a leaf's is 0 and always there.
        leaves = (*program.parameters, *program.buffers, *program.inputs, *program.constants)
        self._lies: dict[str, int] = dict.fromkeys(leaves, 0)
        self._sizes: list[int] = [0]
        self._holders: Counter[int] = Counter()
        self._keeps: dict[int, list[int]] = {}  # instruction -> the memory that it keeps
        self._given: dict[int, list[int]] = {}  # first instruction of a block -> the memory of what it is given
        self._again: dict[int, int] = {}  # memory that the backward makes again -> the memory of which it does
        self._together: dict[int, frozenset[int]] = {}  # such memory -> all that one collective makes again with it
        self._moving: dict[frozenset[int], int] = {}  # bytes that it takes to make them, beside these
        self._first_reads: dict[int, int] = {}  # memory -> the first operator that reads it
        self._late = {one.outputs[0] for one in program.instructions if one.kind == "late"}
        # A collective under way, by its variable -> what ends it, forward by its begin and backward by its late.
        self._ends = {name: one for one in program.instructions if one.moves for name in one.reads}
        self._alive = 0

    def peak(self) -> Peak:
        last = self._program.last_reads()
        for at, instruction in enumerate(self._program.instructions):
            self._make(instruction)
            for name in instruction.reads if instruction.node is not None else ():
                self._first_reads.setdefault(self._lies[name], at)
            self._keep(at, instruction)
            self._keep_given(at, instruction)
            buffers = 0 if "begun" in dict(instruction.gathering.kwargs) else _buffers(instruction, self._program)
            self._note(self._alive + buffers, instruction, "forward")
            for name in dict.fromkeys([*instruction.reads, *instruction.outputs]):
                if last[name] == at:
                    self._let_go([self._lies[name]])
        self._backward()
        return self._peak

    def _note(self, alive: int, instruction: Instruction, direction: str) -> None:
        if self._always + alive > self._peak.bytes:
            named = instruction.node.name if instruction.node else (*instruction.outputs, *instruction.reads)[0]
            self._peak = Peak(self._always + alive, named, direction)

    # Memory

    def _make(self, instruction: Instruction) -> None:
        """Return where the results of an instruction lie."""
        for index, name in enumerate(instruction.outputs):
            read = instruction.reads[index if instruction.passes_on else 0] if instruction.reads else ""
            if instruction.passes_on or self._in_place(instruction):
                self._lies[name] = self._lies[read]
            else:
                self._lies[name] = len(self._sizes)
                self._sizes.append(self._bytes(instruction, name))
            self._hold(self._lies[name])
        if instruction.regathers:
            together = frozenset(self._lies[name] for name in instruction.outputs)
            self._moving[together] = _buffers(instruction, self._program)
            for name, (value, _) in zip(instruction.outputs, instruction.moves, strict=True):
                self._again[self._lies[name]] = self._lies[value.name]
                self._together[self._lies[name]] = together

    def _in_place(self, instruction: Instruction) -> bool:
        if instruction.node is not None:
            return instruction.node.name in self._kept.views
        return instruction.enters or instruction.kind == "shared"

    def _bytes(self, instruction: Instruction, name: str) -> int:
        plan, rank = self._plan, self._program.rank
        if instruction.kind == "begin":
            return _buffers(self._ends[name], self._program)
        if instruction.moves:
            value, step = instruction.moves[instruction.outputs.index(name)]
            return local_bytes(value, step.after, plan.mesh, rank)
        return local_bytes(plan.capture.values[name], plan.layout(name), plan.mesh, rank)

    def _hold(self, memory: int) -> None:
        if not self._holders[memory]:
            self._alive += self._sizes[memory]
        self._holders[memory] += 1

    def _hold_all(self, memories: Iterable[int]) -> None:
        for memory in memories:
            self._hold(memory)

    def _let_go(self, memories: Iterable[int]) -> None:
        for memory in memories:
            self._holders[memory] -= 1
            if not self._holders[memory]:
                self._alive -= self._sizes[memory]

    def _keep(self, at: int, instruction: Instruction) -> None:
        """Return what an operator keeps for its backward."""
        node = instruction.node
        if node is None:
            return
        saved = self._kept.saved[node.name]
        names = [instruction.reads[i] for i in saved.operands or ()] + [node.results[i] for i in saved.results or ()]
        kept = [self._again.get(self._lies[name], self._lies[name]) for name in names]
        if saved.internal:
            kept.append(len(self._sizes))
            self._sizes.append(self._beside(node))
        self._keeps[at] = list(dict.fromkeys(kept))
        if not instruction.block:
            self._hold_all(self._keeps[at])

    def _keep_given(self, at: int, instruction: Instruction) -> None:
        """Keep what a block is given from where it begins, in place of what lies inside."""
        instructions = self._program.instructions
        if instruction.block and (at == 0 or instructions[at - 1].block != instruction.block):
            given = self._program.blocks[instruction.block].given
            lying = [self._again.get(self._lies[name], self._lies[name]) for name in given]
            self._given[at] = list(dict.fromkeys(lying))
            self._hold_all(self._given[at])

    def _make_again(self, at: int) -> None:
        """Hold all that a block's operators keep from where the backward comes to its end, which computes it again."""
        instructions = self._program.instructions
        block = instructions[at].block
        if block and (at + 1 == len(instructions) or instructions[at + 1].block != block):
            inside = at
            while inside >= 0 and instructions[inside].block == block:
                self._hold_all(self._keeps.get(inside, ()))
                inside -= 1

    def _beside(self, node: Node) -> int:
        layouts = {name: self._plan.target(node, i).layout for i, name in enumerate(node.operands)}
        layouts |= {name: self._plan.layout(name) for name in node.results}
        return self._kept.internal_bytes(node, layouts.__getitem__, self._plan.mesh, self._program.rank)

    # The backward

    def _backward(self) -> None:
        gradients: dict[int, int] = {}  # memory of a value -> the bytes of its gradient
        done = 0  # of the gradients of parameters
        whole: set[int] = set()  # memory that was made again, and is still to be read
        come: set[frozenset[int]] = set()  # what is made again together, of which something was read
        order = list(dict.fromkeys(self._together.values()))
        flying: dict[str, int] = {}  # what is scattered and not waited for -> the bytes of what is sent
        for at in reversed(range(len(self._program.instructions))):
            instruction = self._program.instructions[at]
            self._make_again(at)
            if instruction.kind == "late":
                flying.pop(instruction.outputs[0], None)
            results = {self._lies[name] for name in instruction.outputs}
            if instruction.kind != "bucket" and self._has_gradient(instruction):
                new = self._gradients_of(instruction)
                read = {self._lies[name] for name in instruction.reads} if instruction.node else set()
                asked = {self._together[memory] for memory in read & set(self._together)} - come
                come |= asked
                if self._program.prefetches:
                    asked |= {order[at - 1] for at in map(order.index, asked) if at} - come
                asked = {together for together in asked if not together & whole}
                whole = whole.union(*asked)
                made = sum(size for _, size in new) + sum(self._sizes[memory] for memory in whole)
                made += sum(flying.values())
                moving = max((self._moving[together] for together in asked), default=0)
                buffers = max(_buffers(instruction, self._program, backward=True), moving)
                self._note(self._alive + sum(gradients.values()) + done + made + buffers, instruction, "backward")
                if not (instruction.passes_on or self._in_place(instruction)):  # whose gradients lie where they did
                    for memory in results - {memory for memory, _ in new}:
                        gradients.pop(memory, None)
                whole -= {memory for memory in whole if self._first_reads.get(memory, at) == at}
                done += sum(size for memory, size in new if not memory)
                for late in self._late.intersection(instruction.reads):
                    flying[late] = _buffers(instruction, self._program, backward=True)
                gradients.update({memory: size for memory, size in new if memory})
            elif instruction.kind == "bucket":
                flat = sum(local_bytes(value, step.after, self._plan.mesh) for value, step in instruction.moves)
                self._note(self._alive + sum(gradients.values()) + done + flat, instruction, "backward")
            self._let_go(self._keeps.get(at, ()))
            self._let_go(self._given.get(at, ()))

    def _has_gradient(self, instruction: Instruction) -> bool:
        if instruction.node is not None:
            return self._plan.graph.needs_gradient(instruction.node)
        return any(value.needs_gradient for value, _ in instruction.moves)

    def _gradients_of(self, instruction: Instruction) -> list[tuple[int, int]]:
        """The gradients that the backward of an instruction makes, as memory of the operand and bytes."""
        plan, rank, node = self._plan, self._program.rank, instruction.node
        if self._in_place(instruction):
            return []
        if node is None:
            moved = zip(instruction.reads, instruction.moves, strict=False)  # one that is gathered again reads two
            parts = ((name, value, step.before) for name, (value, step) in moved if value.needs_gradient)
            return [(self._lies[name], local_bytes(value, layout, plan.mesh, rank)) for name, value, layout in parts]
        found: list[tuple[int, int]] = []
        for i, name in enumerate(node.operands):
            value: Value = plan.capture.values[name]
            if value.needs_gradient:
                size = local_bytes(value, plan.target(node, i).layout, plan.mesh, rank)
                passed = PASSES_GRADIENT.of(node.op) and any(memory for memory, _ in found)
                found.append((self._lies[instruction.reads[i]], 0 if passed else size))
        return found


def _buffers(instruction: Instruction, program: LocalProgram, *, backward: bool = False) -> int:
    """Return what the collectives of an instruction take beside what they start from and result in."""
    wanted = "backward" if backward else "forward"
    moving = (c for _, way, c in instruction.collectives(program.mesh) if way == wanted and c.kind != "all_reduce")
    if instruction.kind == "joined":
        taken: Counter[str] = Counter()
        for collective in moving:
            taken[collective.kind] += beside_together(collective, program.mesh)
        return max(taken.values(), default=0)
    return max((collective.bytes for collective in moving), default=0)
