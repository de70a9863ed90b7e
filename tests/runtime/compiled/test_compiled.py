"""Programs whose operators between collectives are compiled give what they give without."""

import itertools
import re
import warnings
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from models import NETWORKS
from shardwright.compiler.lower.call import Call, Name
from shardwright.compiler.lower.lower import lower
from shardwright.compiler.lower.program import Instruction
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.runtime.compiled.compiler import Compiler, NotCompiled, Stretch, in_stretches
from shardwright.runtime.compiled.needs import compile_problem, is_to_compile
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


@cache
def planned(name, mode):
    """A network in float64, its batch, and its plan for two ranks."""
    make, loss_fn, batch_of = NETWORKS[name]
    make = dropping if name == "perceptron" else make
    torch.manual_seed(0)
    model, batch = make(), batch_of(6)
    return model, batch, plan_of(model, loss_fn, batch, Mesh.of(d=2), mode)


def test_a_stretch_stands_between_two_collectives(float64):
    program = lower(planned("perceptron", "data")[2], 0)
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


def test_on_a_gpu_a_whole_step_of_one_device_is_one_stretch():
    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    model, batch = GPT(16, width=8, heads=2, layers=1, sequence_length=4), torch.zeros(2, 4, dtype=torch.int64)
    program = lower(plan_of(model, loss_fn, batch, Mesh.of(d=1), "data"), 0)
    for device, rest in (("cuda", []), ("cpu", ["embedding", "embedding", "cross_entropy_sum"])):
        running, stretches = in_stretches(program, partial(may_be_compiled, device=torch.device(device)))
        left = [one.call.function.split(".") for one in running.instructions if one.kind == "operator"]
        assert [name for words in left for name in words if name in ("embedding", "cross_entropy_sum")] == rest
        assert len(left) > len(rest) or (len(left), len(stretches)) == (0, 1)


@pytest.mark.parametrize(
    ("name", "mode"), [("perceptron", "data"), pytest.param("transformer", "auto", marks=pytest.mark.slow)]
)
def test_a_compiled_program_gives_the_same(float64, capfd, name, mode):
    model, batch, plan = planned(name, mode)
    expected = run(plan, model, batch, seed=5)
    same(run(plan, model, batch, seed=5, compiler=Compiler(says=True, backend=EARLY)), expected)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2, "a line for each simulated rank"
    assert said[0].startswith("shardwright: compiled ")
    assert f" in {torch._inductor.runtime.cache_dir_utils.cache_dir()}" in said[0]


@pytest.mark.filterwarnings("default")
def test_code_that_gives_other_numbers_is_not_used(float64):
    model, batch, plan = planned("perceptron", "data")
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
    assert compile_problem("yes", "cpu") == "compile='yes' is unknown; choose one of True, False, 'auto'"
    assert compile_problem("auto", "cpu") is None
    assert [is_to_compile("auto", device) for device in ("cpu", "cuda")] == [False, True]


OPERATORS = [
    Instruction("operator", (made,), (read,), Call("add", (Name(read), number)))
    for number, (read, made) in enumerate(("ab", "bc", "cd", "de", "ef", "fg"), start=1000)
]


def left_out(cuts, failing):
    """What is said of a program whose stretches end at ``cuts``, where those that add ``failing`` are not compiled."""

    def compiled(plain):
        def run(x):
            found = plain(x)
            if failing in ("any", *plain.__code__.co_consts):
                raise OSError("No space left on device")
            return found

        return run

    compiler = Compiler(says=False)
    compiler.compile = compiled
    parts = [OPERATORS[start:stop] for start, stop in itertools.pairwise(cuts)]
    stretches = [Stretch(f"compiled_{i}", tuple(part), part[-1].outputs) for i, part in enumerate(parts)]
    made = compiler.compiled(stretches, len(OPERATORS), "x", {"add": torch.add})
    x = torch.zeros(2)
    for function in made.functions.values():
        x = function(x)
    return made.left_out


def test_programs_that_leave_out_the_same_say_so_alike():
    """Those of two ranks may have other stretches."""
    assert left_out([0, 6], "any") == left_out([0, 2, 6], "any") == "all stretches"
    assert left_out([0, 4, 6], 1005) == left_out([0, 2, 4, 6], 1005) == "f to g"
    assert left_out([0, 6], "none") == ""


class Counting(Compiler):
    """Counts what it compiles."""

    def __init__(self, **options):
        super().__init__(**options)
        self.compiled_functions = []

    def compile(self, function):
        self.compiled_functions.append(function)
        return super().compile(function)


def llama(layers):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, num_key_value_heads=1, use_cache=False)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.networks
@pytest.mark.slow
def test_equal_layers_of_a_llama_are_compiled_once(float64):
    def loss_fn(model, batch):
        return model(input_ids=batch, labels=batch).loss

    batch, layers = torch.randint(32, (2, 4)), 2
    model, compiler = llama(layers), Counting(says=False, backend=EARLY)
    plan = plan_of(model, loss_fn, batch, Mesh.of(d=1), "data", recompute=("model.layers.*",))
    same(run(plan, model, batch, compiler=compiler), run(plan, model, batch))
    assert len(in_stretches(lower(plan, 0))[1]) == layers + 2, "a stretch for each layer, one before and one behind"
    assert len(compiler.compiled_functions) == 3


def test_stretches_of_other_numbers_or_operands_are_not_taken_for_equal(capfd):
    """Names of variables are all that they may differ in."""
    parts = [
        OPERATORS[:2],
        [replace(one, call=replace(one.call, args=(one.call.args[0], 7))) for one in OPERATORS[2:4]],
    ]
    other_names = [
        replace(one, outputs=(f"{one.outputs[0]}_",), reads=(f"{one.reads[0]}_",), call=one.call.renamed("{}_".format))
        for one in OPERATORS[:2]
    ]
    stretches = [
        Stretch(f"compiled_{i}", tuple(p), p[-1].outputs) for i, p in enumerate((*parts, other_names, parts[0]))
    ]
    compiler = Counting(says=True, backend=EARLY)
    made = compiler.compiled(stretches, 8, "x", {"add": torch.add})
    first, second, renamed, again = made.functions.values()
    x = torch.zeros(2)
    assert [f(x).tolist() for f in (first, second, renamed)] == [[2001.0] * 2, [14.0] * 2, [2001.0] * 2]
    assert len(compiler.compiled_functions) == 2
    assert torch.equal(again(x.double()), x.double() + 2001)
    assert len(compiler.compiled_functions) == 3
    made.tell()
    assert " s: 3 kinds of 4 stretches, which take " in capfd.readouterr().err


class Drawing(nn.Module):
    """Every way in which a program draws within a layer."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k))
        attended = functional.scaled_dot_product_attention(q, k, k, dropout_p=0.2, is_causal=True)
        x = functional.dropout(attended.transpose(1, 2).flatten(-2).relu() * 2, 0.3)
        x = functional.rrelu(x, training=True) + torch.rand_like(x) + torch.randn_like(x).tanh()
        return functional.alpha_dropout(x * 3, 0.4).square()


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_no_random_key_stands_within_a_stretch(ranks):
    """A key is a Python integer, another one in each step: code that holds it would be compiled anew, or repeat it."""
    torch.manual_seed(0)
    plan = plan_of(Drawing(), lambda model, x: model(x).mean(), torch.randn(4, 6, 8), Mesh.of(d=ranks), "data")
    program = lower(plan, 0)
    running, stretches = in_stretches(program)
    keys = re.compile(r"\bkey\(\d+\)")
    assert stretches
    assert [keys.findall(stretch.source) for stretch in stretches] == [[]] * len(stretches)
    drawn = sorted(keys.findall(program.source))
    assert len(drawn) >= 5, "the program draws, once for each call of the model that does"
    assert sorted(keys.findall(running.source)) == drawn
