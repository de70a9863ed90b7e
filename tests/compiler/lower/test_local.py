"""The calls that a program on one rank is made of."""

import types

import torch
import torch.nn.functional as F

from rulecheck import Invocation, rule_for, site_of, whole
from shardwright.compiler.capture.ir import NAMES_OF_PROGRAMS
from shardwright.compiler.capture.operators import OPERATORS
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.call import Call
from shardwright.compiler.lower.local import LOCALISERS, localise
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.lower.site import ANY_DEVICE
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.table import TABLE
from shardwright.runtime.programs import execute

TWO = Mesh.of(a=2)


def calls(op: str, args: tuple, assignment: dict[str, list[str]], mesh: Mesh = TWO, partial: tuple = ()) -> list[Call]:
    """The call of every rank."""
    invocation = Invocation(f"aten.{op}", args)
    rule = rule_for(invocation)
    strategy = rule.strategy(assignment, partial)
    results = whole(invocation)
    return [localise(site_of(invocation, rule, strategy, mesh, rank, results)) for rank in range(mesh.size)]


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_the_bias_joins_on_the_first_rank():
    first, second = calls("linear.default", (x(3, 4), x(5, 4), x(5)), {"k": ["a"]})
    operands = (Operand(0), Operand(1), Operand(2))
    assert first == Call("torch.ops.aten.linear.default", operands)
    assert second == Call("kernels.linear_bias_elsewhere", operands)
    assert calls("linear.default", (x(3, 4), x(5, 4), x(5)), {"n": ["a"]}) == [first, first]


def test_shapes_are_those_of_the_part_and_ranges_start_at_it():
    assert [c.args for c in calls("reshape.default", (x(5, 6), (5, 2, 3)), {"f0": ["a"]})] == [
        (Operand(0), [3, 2, 3]),
        (Operand(0), [2, 2, 3]),
    ]
    assert [c.args for c in calls("arange.start_step", (1, 11, 2), {"i": ["a"]})] == [(1, 7, 2), (7, 11, 2)]


def test_what_is_made_from_nothing_is_made_on_the_device_of_the_run():
    first, _ = calls("zeros.default", ((4, 2),), {"*1": ["a"]})
    assert first == Call("torch.ops.aten.zeros.default", ([2, 2],), (("device", ANY_DEVICE),))


def test_every_operator_that_draws_has_a_local_form():
    assert {key for key, row in TABLE.items() if row.draws} <= set(LOCALISERS.facts)


def test_each_of_our_own_operators_has_a_function():
    assert {key for key in TABLE if key.startswith("shardwright.")} == set(OPERATORS.facts)


def test_no_value_has_a_name_that_programs_are_written_with():
    names = (name for name in sorted(NAMES_OF_PROGRAMS) if not hasattr(torch.nn.ParameterDict, name))
    model = torch.nn.ParameterDict({name: torch.ones(2) for name in names})
    batch = torch.ones(4, 2)
    graph = captured_step(model, lambda m, b: sum(F.dropout(p * b).sum() for p in m.values()), batch, {})
    assert not NAMES_OF_PROGRAMS & set(graph.values)
    source = lower(make_plan(graph, PlanRequest(Mesh(()), "single")), 0).source
    compiled = compile(source, "program", "exec")
    step = next(const for const in compiled.co_consts if isinstance(const, types.CodeType))
    assert {*step.co_varnames[: step.co_argcount], step.co_name, *execute._NAMES} <= NAMES_OF_PROGRAMS
