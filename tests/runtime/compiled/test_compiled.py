"""Programs whose operators between collectives are compiled give what they give without."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from models import NETWORKS
from shardwright.compiler.lower.call import Call, Name
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.lower.program import Instruction
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.runtime.compiled.compiler import Compiler, NotCompiled, Stretch, in_stretches
from shardwright.runtime.compiled.needs import compile_problem
from shardwright.runtime.programs.execute import may_be_compiled
from shardwright.training.zoo import GPT
from whole import plan_of, run, same

# What torch does before it writes code: it takes no compiler of C++.
EARLY = "aot_eager"


class Wrong(Compiler):
    """Makes code that gives other numbers."""

    def compile(self, function):
        def other(*given):
            results = function(*given)
            return results + 1 if isinstance(results, torch.Tensor) else tuple(result * 2 for result in results)

        return other


def dropping():
    """A network that draws in the middle of what is compiled."""
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 12))


def network(name, rows=6):
    make, loss_fn, batch = NETWORKS[name]
    make = dropping if name == "perceptron" else make
    torch.manual_seed(0)
    return make(), loss_fn, batch(rows)


def test_a_stretch_stands_between_two_collectives(float64):
    model, loss_fn, batch = network("perceptron")
    program = lower(plan_of(model, loss_fn, batch, Mesh.of(d=2), "data"), 0)
    running, stretches = in_stretches(program)
    assert running.collectives() == program.collectives()
    assert len(stretches) >= 1
    inside = [instruction for stretch in stretches for instruction in stretch.instructions]
    assert not [one for one in inside if one.collectives(program.mesh)]
    assert [one.call.source for one in inside if one.call.function.startswith("draws.")] == [
        "draws.native_dropout(gelu, 0.3, kept_native_dropout_out0, [6, 16], [0, 0], [3, 16])"
    ]
    left = [instruction for instruction in running.instructions if instruction.kind != "stretch"]
    drawn = "draws.kept(0.3, key(3), [6, 16], [0, 0], [3, 16], device)"
    assert [one.call.source for one in left if one.call.draws] == [drawn]
    assert len(left) + len(inside) == len(program.instructions) + 1
    assert compile(running.source, "", "exec")


@pytest.mark.parametrize(("device", "rest"), [("cuda", []), ("cpu", ["embedding", "embedding", "cross_entropy_sum"])])
def test_on_a_gpu_a_whole_step_of_one_device_is_one_stretch(device, rest):
    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    model, batch = GPT(16, width=8, heads=2, layers=1, sequence_length=4), torch.zeros(2, 4, dtype=torch.int64)
    program = lower(plan_of(model, loss_fn, batch, Mesh.of(d=1), "data"), 0)
    running, stretches = in_stretches(program, lambda one: may_be_compiled(one, torch.device(device)))
    left = [one.call.function.split(".") for one in running.instructions if one.kind == "operator"]
    assert [name for words in left for name in words if name in ("embedding", "cross_entropy_sum")] == rest
    assert len(left) > len(rest) or (len(left), len(stretches)) == (0, 1)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("perceptron", "data"), pytest.param("transformer", "auto", marks=pytest.mark.slow)],
)
def test_a_compiled_program_gives_the_same(float64, capfd, name, mode):
    model, loss_fn, batch = network(name)
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=2), mode)
    expected = run(plan, model, batch, seed=5)
    same(run(plan, model, batch, seed=5, compiler=Compiler(says=True, backend=EARLY)), expected)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2, "a line for each simulated rank"
    assert said[0].startswith("shardwright: compiled ")
    assert f" in {torch._inductor.runtime.cache_dir_utils.cache_dir()}" in said[0]


@pytest.mark.filterwarnings("default")
def test_code_that_gives_other_numbers_is_not_used(float64):
    model, loss_fn, batch = network("perceptron")
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=2), "data")
    expected = run(plan, model, batch)
    with pytest.warns(NotCompiled, match="run uncompiled: the compiled code gives other results, which deviate by"):
        same(run(plan, model, batch, compiler=Wrong(says=False)), expected)


class Rounding(Compiler):
    """Makes code whose gradients are another by as much as bfloat16 rounds."""

    def compile(self, function):
        def other(*given):
            result = function(*given)
            return result + (result - result.detach()) * 2**-8

        return other


@pytest.mark.parametrize(("dtype", "told"), [(torch.bfloat16, 0), (torch.float32, 1)])
def test_float32_gradients_of_products_in_bf16_may_differ_by_what_bf16_rounds(dtype, told):
    def loss_fn(model, batch):
        return (batch.to(dtype) @ model.weight.to(dtype).T).float().square().mean()

    model, batch = nn.Linear(8, 8, bias=False), torch.randn(6, 8)
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=1), "data")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(plan, model, batch, compiler=Rounding(says=False))
    assert len([one for one in found if one.category is NotCompiled]) == told


def test_many_shapes_of_batches_are_told():
    compiler = Compiler(says=True, backend=EARLY)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in range(9):
            compiler.compiled([], 0, f"x: [{rows}, 4]", {})
    assert [str(one.message).partition(":")[0] for one in told] == ["8 programs have been compiled, the last one for x"]


def test_what_is_missing_is_told_before_anything_is_captured(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "there is no no-such-compiler here; type `apt-get install g++`" in compile_problem(True, "cpu")
    assert compile_problem(False, "cpu") is None
    assert compile_problem("yes", "cpu") == "compile='yes' is unknown; choose one of True, False"


OPERATORS = [
    Instruction("operator", (made,), (read,), Call("add", (Name(read), 1)))
    for read, made in ("ab", "bc", "cd", "de", "ef", "fg")
]


def left_out(cuts, failing):
    """What is said of a program whose stretches end at ``cuts``, where those that make ``failing`` are not compiled."""

    def compiled(plain):
        def run(x):
            found = plain(x)
            if failing in names[plain.__name__]:
                raise OSError("No space left on device")
            return found

        return run

    compiler = Compiler(says=False)
    compiler.compile = compiled
    parts = [OPERATORS[start:stop] for start, stop in itertools.pairwise(cuts)]
    stretches = [Stretch(f"compiled_{i}", tuple(part), part[-1].outputs) for i, part in enumerate(parts)]
    names = {s.function: {"any", *(name for one in s.instructions for name in one.outputs)} for s in stretches}
    made = compiler.compiled(stretches, len(OPERATORS), "x", {"add": torch.add})
    x = torch.zeros(2)
    for function in made.functions.values():
        x = function(x)
    return made.left_out


def test_programs_that_leave_out_the_same_say_so_alike():
    """Those of two ranks may have other stretches."""
    assert left_out([0, 6], "any") == left_out([0, 2, 6], "any") == "all stretches"
    assert left_out([0, 4, 6], "g") == left_out([0, 2, 4, 6], "g") == "f to g"
    assert left_out([0, 6], "none") == ""
