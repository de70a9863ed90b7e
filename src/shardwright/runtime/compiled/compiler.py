"""The operators between two collectives of a program as one function, a stretch, which torch compiles at its first use.

Stretches that do the same, as those of equal layers, are compiled once: they have one text with variables numbered in
their order, and operands of the same shapes, strides and dtypes.

What communicates, draws random numbers, or checks what a user gave it stays in the program as it is. The mask of a
dropout is drawn before the stretch that the dropout is in.

Before a compiled stretch is used, it has given what its operators give: once, in this process, on the numbers of the
first batch, with gradients. One that does not, or that cannot be compiled, runs as without, and a warning says why.
"""

from __future__ import annotations

import sys
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.common import trees
from shardwright.common.pulse import own_pulse
from shardwright.common.torch_private import OperatorMode, code_from_cache, compiled_code_directory
from shardwright.compiler.lower.call import DEVICE, Call, Name
from shardwright.compiler.lower.program import Instruction, LocalProgram, function_of, given_to, unused, variables

Chosen = Callable[[Instruction], bool]
"""A function that returns whether an instruction may be part of a stretch."""
_DROPOUTS = ("draws.dropout", "draws.native_dropout")
_COMPOSED = ("ops.cross_entropy_sum", "ops.cross_entropy_count")  # of torch's operators
_FEWEST = 2  # operators: to call one that is compiled costs more than the operator


@dataclass(frozen=True)
class Stretch:
    """Instructions as one function of what they read and do not make, which gives what is read behind them."""

    function: str
    instructions: tuple[Instruction, ...]
    results: tuple[str, ...]

    @property
    def span(self) -> str:
        """The first and the last of the values that it makes, as the programs of all ranks call them."""
        return f"{self.instructions[0].outputs[0]} to {self.instructions[-1].outputs[-1]}"

    @property
    def call(self) -> Instruction:
        """Return what stands in the program in their place."""
        given = given_to(self.instructions)
        call = Call(self.function, variables(given))
        regathered = tuple(dict.fromkeys(name for each in self.instructions for name in each.regathered))
        return Instruction(
            "stretch", self.results, given, call, block=self.instructions[0].block, regathered=regathered
        )

    @property
    def source(self) -> str:
        """The function, with numbered variables: stretches that do the same have the same text."""
        given = given_to(self.instructions)
        made = [name for instruction in self.instructions for name in instruction.outputs]
        numbered = {name: f"v{number}" for number, name in enumerate(dict.fromkeys([*given, *made]))}

        def new(name: str) -> str:
            return numbered.get(name, name)  # others are those of what is around the program

        instructions = [
            replace(
                one, outputs=tuple(map(new, one.outputs)), reads=tuple(map(new, one.reads)), call=one.call.renamed(new)
            )
            for one in self.instructions
        ]
        return function_of("stretch", [*map(new, given)], instructions, [*map(new, self.results)])


def calls_torch(instruction: Instruction) -> bool:
    """Return whether an instruction calls operators of torch's own alone, on what it reads and perhaps on a mask."""
    call = instruction.call
    if instruction.kind == "shared":
        return True
    return instruction.kind == "operator" and (call.calls_aten or call.function in (*_DROPOUTS, *_COMPOSED))


def in_stretches(program: LocalProgram, chosen: Chosen = calls_torch) -> tuple[LocalProgram, list[Stretch]]:
    """Return the program with functions in place of its stretches, and these."""
    last = program.last_reads()
    instructions: list[Instruction] = []
    stretches: list[Stretch] = []
    end = 0
    # Instructions that follow each other, all chosen or all not, and all of one block that the backward repeats.
    for (is_chosen, _), run in groupby(program.instructions, key=lambda one: (chosen(one), one.block)):
        members = list(run)
        end += len(members)
        if len(members) < _FEWEST or not is_chosen:
            instructions += members
            continue
        results = tuple(name for member in members for name in member.outputs if last[name] >= end)
        name = unused(f"compiled_{len(stretches) + 1}", program.names)
        masks, inside = _masks_before(members, program.names)
        stretches.append(Stretch(name, tuple(inside), results))
        instructions += [*masks, stretches[-1].call]
    return replace(program, instructions=tuple(instructions)), stretches


def _masks_before(members: Sequence[Instruction], taken: set[str]) -> tuple[list[Instruction], list[Instruction]]:
    """Instructions that draw the masks of the dropouts among the members, and the members, which read these.

    A number that changes with each step, as a key does, would be compiled anew.
    """
    masks, inside = list[Instruction](), list[Instruction]()
    for member in members:
        if member.call.function not in _DROPOUTS:
            inside.append(member)
            continue
        name = unused(f"kept_{member.outputs[0]}", taken)
        x, p, key, *place = member.call.args
        masks.append(
            Instruction("operator", (name,), (), Call("draws.kept", (p, key, *place, DEVICE)), block=member.block)
        )
        call = Call(member.call.function, (x, p, Name(name), *place))
        inside.append(replace(member, reads=(*member.reads, name), call=call))
    return masks, inside


# So that a number of half precision is rounded where the operators round it.
_OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
_TIMED = 3
MANY_PROGRAMS = 8
"""A program for each of so many shapes and kinds of step is more than the last batches of epochs make."""

Function = Callable[..., Any]
_Made = tuple[list[Tensor], list[Tensor]]  # results, and the gradients of what they were made of


class NotCompiled(UserWarning):
    """A part of a program runs without being compiled, or programs are compiled again and again."""


class Compiler:
    """Compiles programs. ``says`` is whether it tells how long that took, as one rank does for all."""

    def __init__(self, says: bool, backend: str = "inductor") -> None:
        self._says = says
        self._options = _OPTIONS if backend == "inductor" else None
        self._backend = backend
        self._programs = 0

    def compiled(self, stretches: Sequence[Stretch], operators: int, what: str, scope: dict[str, Any]) -> Compiled:
        """The stretches of a program for ``what``, which has so many operators; ``scope`` is what these name."""
        self._programs += 1
        if self._programs == MANY_PROGRAMS and self._says:
            warnings.warn(
                NotCompiled(
                    f"{MANY_PROGRAMS} programs have been compiled, the last one for {what}: each shape of a batch has "
                    "its own; pad batches to few shapes, or leave compile=True out"
                ),
                stacklevel=2,
            )
        inside = sum(one.kind == "operator" for stretch in stretches for one in stretch.instructions)
        return Compiled(stretches, f"{inside} of {operators}", what, self, scope)

    def compile(self, function: Function) -> Function:
        """Return what torch makes of a function of tensors, without the Python around it."""
        return torch.compile(function, fullgraph=True, dynamic=False, backend=self._backend, options=self._options)

    def say(self, text: str) -> None:
        if self._says:
            print(f"shardwright: {text}", file=sys.stderr, flush=True)


class Compiled:
    """The stretches of one program: its ``functions``, and the messages about them."""

    def __init__(
        self, stretches: Sequence[Stretch], operators: str, what: str, compiler: Compiler, scope: dict[str, Any]
    ) -> None:
        self._operators, self._what, self._compiler = operators, what, compiler
        self._took_s, self._reasons, self._times = 0.0, list[str](), list[_Times]()
        self._before = code_from_cache()
        self._scope = scope
        # Cached by the text of a function and by all that torch's guards look at of operands: code for one is right for
        # the other, and where these guards see a difference that the key does not have, torch compiles for it.
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self.functions = {s.function: _Tried(s.source, self) for s in stretches}
        self._spans = [s.span for s in stretches]

    @property
    def left_out(self) -> str:
        """Return which stretches run uncompiled: in the same words on ranks whose programs have others."""
        ways = [tried.plain_ways for tried in self.functions.values()]
        if ways and all(each == ways[0] for each in ways):
            return ", ".join(f"all stretches{how}" for how in ways[0])
        return ", ".join(f"{span}{how}" for span, each in zip(self._spans, ways, strict=True) for how in each)

    def kind_of(self, source: str, given: Sequence[Tensor]) -> _Kind:
        """Return what stretches of a text have in common that are given such operands."""
        key = (source, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(_seen_by_guards, given))
        if key not in self._kinds:
            plain = _made(source, self._scope)
            self._kinds[key] = _Kind(plain, self._compiler.compile(plain))
        return self._kinds[key]

    def tell(self) -> None:
        """Say what was compiled since this was last called, if anything was."""
        if not self._took_s:
            return
        found, made = (now - before for now, before in zip(code_from_cache(), self._before, strict=True))
        cached = f"; {found} of {found + made} parts were in its cache" if found else ""
        kinds, count = len({id(times) for times in self._times}), len(self._times)
        pays = f", which take {_ms(self._times, 0)} ms a step in place of {_ms(self._times, 1)}" if kinds else ""
        self._compiler.say(
            f"compiled {self._operators} operators for {self._what} in {self._took_s:.1f} s: {kinds} kinds of {count} "
            f"stretches{pays}{cached}; it is kept in {compiled_code_directory()}"
        )
        for reason, count in {reason: self._reasons.count(reason) for reason in self._reasons}.items():
            text = (
                f"{count} of {len(self.functions)} stretches of the program for {self._what} run uncompiled: {reason}"
            )
            warnings.warn(NotCompiled(text), stacklevel=2)
        self._took_s, self._reasons, self._times, self._before = 0.0, [], [], code_from_cache()

    def note(self, took_s: float, problem: str, times: _Times | None) -> None:
        """Take in how long a stretch took to compile and compare, why it runs uncompiled, and what its kind takes."""
        self._took_s += took_s
        self._reasons += [problem] if problem else []
        self._times += [times] if times else []
        own_pulse().beat()


@dataclass(eq=False)
class _Times:
    """The seconds of a forward and a backward."""

    compiled_s: float
    plain_s: float


@dataclass
class _Kind:
    """A stretch as operators and as what torch makes of it; ``times`` once it was compared."""

    plain: Function
    compiled: Function
    times: _Times | None = None


class _Tried:
    """A stretch that is compiled at its first call, with gradients and without, if what is made of it is right."""

    def __init__(self, source: str, program: Compiled) -> None:
        self._source, self._program = source, program
        # Cached by whether there are gradients, and inference mode: a program has one dtype and shape of each operand,
        # and what is compiled has been compared with what is not.
        self._chosen: dict[tuple[bool, bool], Function] = {}
        self._plain = set[tuple[bool, bool]]()

    def __call__(self, *given: Tensor) -> Any:
        how = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if how not in self._chosen:
            self._chosen[how] = self._choose(given, how)
        return self._chosen[how](*given)

    @property
    def plain_ways(self) -> list[str]:
        """Return how it was called where it runs uncompiled: " without gradients", or not."""
        plain = {with_gradients for with_gradients, _ in self._plain}
        return ["" if with_gradients else " without gradients" for with_gradients in sorted(plain)]

    def _choose(self, given: Sequence[Tensor], how: tuple[bool, bool]) -> Function:
        start_s = time.perf_counter()
        kind = self._program.kind_of(self._source, given)
        # What a program keeps for its backward is not to be kept of these.
        as_they_are = torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
        with warnings.catch_warnings(), as_they_are:
            warnings.simplefilter("ignore")  # of names that the compiler itself uses, and of what may be faster still
            try:
                found = _results(kind.compiled, given)
                expected, rounding = _with_rounding(lambda: _results(kind.plain, given))
                problem = difference(found, expected, rounding)
                del found, expected
                if not problem and kind.times is None:
                    kind.times = _Times(*(_seconds(function, given) for function in (kind.compiled, kind.plain)))
            except Exception as error:  # there are as many as there are ways to fail in a compiler
                problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        self._program.note(time.perf_counter() - start_s, problem, None if problem else kind.times)
        if problem:
            self._plain.add(how)
        return kind.plain if problem else kind.compiled


def _made(source: str, scope: dict[str, Any]) -> Function:
    names = dict(scope)
    exec(compile(source, f"<stretch {zlib.crc32(source.encode()):x}>", "exec"), names)
    made: Function = names["stretch"]
    return made


def _seen_by_guards(tensor: Tensor) -> tuple[Any, ...]:
    """Return what code of torch's compiler takes for granted of an operand."""
    return (
        isinstance(tensor, nn.Parameter), tensor.requires_grad, tensor.dtype, tensor.device, tuple(tensor.shape),
        tensor.stride(),
    )  # fmt: skip


def _seconds(function: Function, given: Sequence[Tensor]) -> float:
    """Return the seconds of a forward and a backward, the least of some."""
    took = []
    for _ in range(_TIMED):
        start_s = time.perf_counter()
        _results(function, given)
        if given and given[0].is_cuda:
            torch.cuda.synchronize(given[0].device)
        took.append(time.perf_counter() - start_s)
    return min(took)


def _ms(times: Sequence[_Times], which: int) -> str:
    return f"{1e3 * sum((each.compiled_s, each.plain_s)[which] for each in times):.3g}"


def _results(function: Function, given: Sequence[Tensor]) -> _Made:
    """Return what a function gives of the same tensors, and the gradients of these for some gradient of that."""
    copies = [_like(tensor) for tensor in given]
    results = function(*copies)
    results = [results] if isinstance(results, Tensor) else list(results)
    sources, targets = ([x for x in tensors if x.requires_grad] for tensors in (copies, results))
    gradients: Sequence[Tensor | None] = ()
    if sources and targets:
        gradients = torch.autograd.grad(targets, sources, [_some(x) for x in targets], allow_unused=True)
    return [x.detach() for x in results], [x for x in gradients if x is not None]


def _like(tensor: Tensor) -> Tensor:
    """Return copies for torch to compile for: parameters and needs of gradients stay what they were."""
    alike = tensor.detach()
    return (
        nn.Parameter(alike, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else alike.requires_grad_(tensor.requires_grad)
    )


def _some(like: Tensor) -> Tensor:
    """Numbers of which no generator knows that a program draws from."""
    generator = torch.Generator(like.device).manual_seed(like.numel())
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def _with_rounding(call: Callable[[], _Made]) -> tuple[_Made, float]:
    """Return what a call gives, and the coarsest relative rounding of the floating-point numbers that it makes.

    Float32 gradients of a product in bfloat16 are as exact as bfloat16 is, and a product in TF32 has its 10 bits.
    """
    coarsest = [0.0]

    def noting(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        coarsest.extend(_rounding(leaf) for leaf in trees.tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    with OperatorMode(noting):
        made = call()
    return made, max(coarsest)


def _rounding(tensor: Tensor) -> float:
    """The relative rounding of a tensor's numbers; 0 where they are not rounded."""
    dtype = tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    in_tf32 = tensor.is_cuda and dtype == torch.float32
    in_tf32 &= torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return 2.0**-10 if in_tf32 else float(torch.finfo(dtype).eps)


def difference(found: _Made, expected: _Made, rounding: float) -> str:
    """Return what is wrong with tensors that are to be others to half of the digits of ``rounding``, "" for nothing.

    The measure is the largest deviation against the largest number of all gradients, or of a result.
    """
    for what, ours, theirs in zip(("results", "gradients"), found, expected, strict=True):
        if [x.shape for x in ours] != [x.shape for x in theirs]:
            return f"the compiled code gives {what} of other shapes"
        largest = max((_largest(x) for x in theirs), default=0.0)
        for one, other in zip(ours, theirs, strict=True):
            measure = largest if what == "gradients" else _largest(other)
            deviation = _deviation(one, other)
            rounded = other.is_floating_point() or other.is_complex()
            if not deviation <= (rounding**0.5 * measure if rounded else 0.0):
                return f"the compiled code gives other {what}, which deviate by {deviation:.2g} of {measure:.2g}"
    return ""


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(_wide(finite).abs().max()) if finite.numel() else 0.0


def _deviation(one: Tensor, other: Tensor) -> float:
    """The largest difference; numbers that are infinite, or none, are to be so in both."""
    apart = (_wide(one) - _wide(other)).abs()
    alike = (one == other) | (one.isnan() & other.isnan())
    return float(apart.masked_fill(alike, 0).max()) if apart.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
