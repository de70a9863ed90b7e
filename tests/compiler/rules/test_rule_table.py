"""The columns of the table of operators, held against what torch does."""

from collections.abc import Callable, Iterator

import pytest
import torch
from rule_cases import CASES, Draw, Make, explore
from torch import Tensor

from rulecheck import bound, plain, shapes_of
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.rules import layers
from shardwright.compiler.rules.notation import Operand, parse
from shardwright.compiler.rules.row import EVERYTHING, NOTHING, InternalTensor, Operator, Row, Saved
from shardwright.compiler.rules.table import TABLE, column, internal_collectives, key_of, row_of
from shardwright.errors import StrategyError

# Overloads beside those that are drawn, and why nothing has to be said about them.
NOT_DRAWN = {
    "values decide the shape of the result, which a capture refuses": {"where.default"},
    "written by TorchScript alone": {
        "copy.Dict_Tensor",
        "to.prim_Device",
        "to.prim_dtype",
        "to.prim_other",
        "einsum.sublist",
    },
    "a capture has _to_copy in their place": {"to.device", "to.dtype_layout"},
    "a generator is no value of a graph": {
        "rand_like.generator",
        "randn_like.generator",
        "randint_like.generator",
        "randint_like.low_generator_dtype",
        "randint_like.Tensor_generator",
        "randperm.generator",
    },
    "run on a GPU alone": {"mm.dtype", "bmm.dtype", "addmm.dtype", "baddbmm.dtype"},
}


def overloads(key: str) -> Iterator[str]:
    """Every overload for which the row of this name stands, and that a graph can hold: none that writes, or that names
    its dims."""
    _, name, *overload = key.split(".")
    packet = getattr(torch.ops.aten, name)
    for one in overload or packet.overloads():
        schema = getattr(packet, one)._schema
        writes = any(a.is_out or (a.alias_info and a.alias_info.is_write) for a in schema.arguments)
        named = any("Dimname" in str(argument.type) for argument in schema.arguments)
        makes = any("Tensor" in str(value.type) for value in schema.returns)
        if makes and not writes and not named and key_of(f"aten.{name}.{one}") == key:
            yield f"{name}.{one}"


def test_every_overload_for_which_a_row_stands_is_drawn():
    drawn = {op.removeprefix("aten.") for op, _ in CASES}
    excepted = set().union(*NOT_DRAWN.values())
    ruled = [key for key, row in TABLE.items() if row.rule is not None and key.startswith("aten.")]
    known = {overload for key in ruled for overload in overloads(key)}
    assert sorted(known - drawn - excepted) == []
    assert excepted <= known


def test_every_row_is_of_an_operator():
    for key in TABLE:
        namespace, name, *overload = key.split(".")
        if namespace == "aten":
            assert set(overload) <= set(getattr(torch.ops.aten, name).overloads()), key


# What is kept for the backward, and what carries a gradient


class Kept:
    """Which tensors torch keeps for the backward of drawn invocations, and which ones the table says it keeps."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()
        self.said: set[tuple[str, int]] = set()

    def compare(self, op: str, make: Make, d: Draw) -> None:
        """Run one invocation, and note what is kept of it."""
        args, kwargs, tensors = bound(made := make(d, op))
        packed: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
            results = plain(args, kwargs, made.op, tensors)
        if not any(result.requires_grad for result in results):
            return
        operator = Operator(op, args, kwargs, tuple(shapes_of(tensors)), tuple(shapes_of(results)))
        row = row_of(op)
        saved = row.saved(operator).where([tensor.requires_grad for tensor in tensors])
        self.said |= {("operand", i) for i in saved.operands} | {("result", i) for i in saved.results}
        places = {memory(t): ("result", i) for i, t in enumerate(results) if t.numel()}
        places |= {memory(t): ("operand", i) for i, t in enumerate(tensors) if t.numel()}
        self.seen |= {places[memory(t)] for t in packed if memory(t) in places}
        inside = {memory(t): t.nbytes for t in packed if memory(t) not in places}
        if row.between is not None:  # which keeps slices of tensors, and orders of rows that are small beside these
            floats = [t.untyped_storage() for t in packed if memory(t) not in places and t.is_floating_point()]
            inside = {storage.data_ptr(): storage.nbytes() for storage in floats}
        if not row.draws and saved.internal:
            said = sum(bytes_beside(beside, tensors, results) for beside in saved.internal)
            assert said <= sum(inside.values()) <= said + SMALL_BYTES
        for i, result in enumerate(results):
            carries = row.differentiable is None or i < row.differentiable
            continuous = result.is_floating_point() or result.is_complex()
            assert result.requires_grad == (carries and continuous), f"result {i} of {op}"


SMALL_BYTES = 64  # of what is not counted: weights and counts of classes


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def bytes_beside(beside: InternalTensor, operands: list[Tensor], results: list[Tensor]) -> int:
    like = (operands if beside.like == "operand" else results)[beside.index]
    return round(like.numel() * beside.times * (beside.itemsize or like.itemsize))


def cases_of_rows() -> dict[str, list[tuple[str, Make]]]:
    """The cases, together where they have one row; those of which torch's own operator has no backward left out."""
    groups: dict[str, list[tuple[str, Make]]] = {}
    for op, make in CASES:
        if key_of(op) not in {"aten.copy", "shardwright.batch_norm_per_replica"}:
            groups.setdefault(str(key_of(op)), []).append((op, make))
    return groups


@pytest.mark.parametrize("key", cases_of_rows())
def test_what_is_kept_for_the_backward_is_what_the_table_says(key):
    # The bias of a normalisation and the mask of an attention are kept in some cases only, a few of torch's choice.
    exact = TABLE[key].saves is not None and TABLE[key].saves is not EVERYTHING and "norm" not in key
    kept = Kept()
    for examples in (3, 12):  # few show most of what is kept
        for op, make in cases_of_rows()[key]:
            explore(examples, lambda d, op=op, make=make: kept.compare(op, make, d), op)
        if kept.seen == kept.said or not exact:
            break
    assert kept.seen <= kept.said
    assert kept.seen == kept.said or not exact


FACTORS = sorted({key_of(op) for op, _ in CASES if isinstance(row_of(op).saves, Saved) and row_of(op).saves.factors})


@pytest.mark.parametrize("key", ["aten.mul", "aten.div", *FACTORS])
def test_factors_are_kept_for_the_gradients_of_others(key):
    [op, make] = next((op, make) for op, make in CASES if key_of(op) == key)
    for position in range(2):
        kept = Kept()

        def compare(d, at=position, kept=kept):
            made = make(d, op)
            args, kwargs, tensors = bound(made)
            factors = row_of(op).saved(Operator(op, args, kwargs, tuple(shapes_of(tensors)), ())).factors
            if len(tensors) > 1:
                tensors[(factors[0] if len(factors) > 1 else 0) + at].requires_grad_(False)
            kept.compare(op, lambda d, op: made, d)

        explore(10, compare)
        assert kept.seen == kept.said


def test_an_operator_without_a_row_keeps_all_that_it_has():
    operator = Operator("aten.trapz.x", (), {}, ((4,), (4,)), ((),))
    assert row_of("aten.trapz.x").saved(operator) == Saved((0, 1), (0,))
    assert Row(view=True).saved(operator) == NOTHING
    assert Row(saves=Saved(operands=(0, 5))).saved(operator) == Saved((0,))


# Random numbers and collectives inside


def test_a_row_says_that_it_draws_where_torch_says_so():
    said = {key for key, row in TABLE.items() if row.draws}
    ruled = [key for key, row in TABLE.items() if row.rule is not None and key.startswith("aten.")]
    assert said == {key for key in ruled if any(layers.draws(f"aten.{overload}") for overload in overloads(key))}


def test_a_rule_that_merges_needs_to_say_how():
    rule = parse("n& c -> n c").bind([(4, 3)], [(4, 3)])
    strategy = rule.strategy({"n": ["a"]})
    with pytest.raises(StrategyError, match=r"merges over a, and its row has no inside="):
        internal_collectives(
            Operator("aten.relu.default", (Operand(0),), {}, ((4, 3),), ((4, 3),)), rule, strategy, Mesh.of(a=2), 4
        )


# Columns that stand in other rooms


def test_a_column_is_looked_up_as_the_row_is():
    of_all = column(("sum", 1), ("max", 2), ("rand.default", 3))
    facts = {
        "sum.default": 1,
        "sum.dim_IntList": 1,
        "max.default": 2,
        "max.dim": None,
        "rand.default": 3,
        "trapz.x": None,
    }
    assert {op: of_all.of(f"aten.{op}") for op in facts} == facts


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            (("rellu", 1),),
            r"aten\.rellu: no row of shardwright\.\S+\.table has this name; add one there first",
        ),
        ((("rand", 1),), r"aten\.rand: no row"),
        ((("relu tanh", 1), ("tanh", 2)), r"aten\.tanh stands twice"),
    ],
)
def test_a_column_refuses_what_is_no_row(lines: tuple[tuple[str, Callable]], reason: str):
    with pytest.raises(ValueError, match=reason):
        column(*lines)
