"""The calls that a program on one rank is made of."""

import types

import torch
import torch.nn.functional as F

from rulecheck import Invocation, rule_for, site_of, whole
from shardwright.compiler.capture.ir import NAMES_OF_PROGRAMS
from shardwright.compiler.capture.operators import OPERATORS
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.lower.call import COMM, Call, random_key
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


def test_most_operators_run_as_they_are():
    plain = Call("torch.ops.aten.softmax.int", (Operand(0), 1))
    assert calls("softmax.int", (x(4, 3), 1), {"d0": ["a"]}) == [plain, plain]


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


def test_group_norm_gets_its_local_numbers():
    first, _ = calls("native_group_norm.default", (x(6, 8, 5), x(8), x(8), 6, 8, 5, 4, 1e-5), {"n": ["a"]})
    assert first.args[3:] == (3, 8, 5, 4, 1e-5)
    first, _ = calls("native_group_norm.default", (x(6, 8, 5), x(8), x(8), 6, 8, 5, 4, 1e-5), {"g": ["a"]})
    assert first.args[3:] == (6, 4, 5, 2, 1e-5)


def test_random_operators_know_where_their_part_starts():
    _, second = calls("native_dropout.default", (x(5, 4), 0.1, True), {"*1": ["a"]})
    assert second == Call("draws.native_dropout", (Operand(0), 0.1, random_key(7), [5, 4], [3, 0], [2, 4]))


def test_batch_norm_knows_how_many_values_every_rank_has():
    args = (x(5, 4, 3), x(4), x(4), True, 0.1, 1e-5)
    first, second = calls("_native_batch_norm_legit.no_stats", args, {"n": ["a"]})
    assert first == second == Call("kernels.batch_norm", (*map(Operand, range(3)), 1e-5, COMM, ("a",), [9, 6]))


def test_an_empty_part_makes_nothing():
    *_, last = calls("relu.default", (x(2, 3),), {"*1": ["a"]}, Mesh.of(a=3))
    assert last == Call("kernels.nothing", ([[0, 3]], [torch.float64], [False], Operand(0)))


def test_what_is_made_from_nothing_is_made_on_the_device_of_the_run():
    first, _ = calls("zeros.default", ((4, 2),), {"*1": ["a"]})
    assert first == Call("torch.ops.aten.zeros.default", ([2, 2],), (("device", ANY_DEVICE),))


def test_gradients_of_tables_are_dense():
    first, _ = calls("embedding.default", (x(4, 2), torch.arange(4), -1, False, True), {"d": ["a"]})
    assert first.args == (Operand(0), Operand(1), -1, False, False)


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
