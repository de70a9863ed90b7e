"""The table of autocast: every operator that has a rule, in bfloat16 and float16, on CPUs and GPUs.

Under autocast an operator casts its operands, is told to compute in another dtype, or does either in its parts. A graph
has casts in place of that; they must lead to the same dtypes, and on a CPU to the same numbers.
"""

from collections import Counter

import pytest
import torch
from rule_cases import CASES, explore
from torch import fx

from gpu_like import GPU, gpu_autocast
from rulecheck import bound
from shardwright.common.torch_private import empty_like_on, fake_mode
from shardwright.common.trees import tree_leaves, tree_map
from shardwright.compiler.capture.operators import resolve
from shardwright.compiler.capture.tracing.regions import Autocast, Place, copy_operators
from shardwright.compiler.rules.notation import Operand
from shardwright.compiler.rules.table import row_of
from shardwright.errors import CaptureError

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERATORS = [(op, make) for op, make in CASES if op.startswith("aten.")]


def graph_of(op, args, kwargs, tensors):
    """A graph of the one operator, for tensors like these."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    for node, tensor in zip(inputs, tensors, strict=True):
        node.meta["val"] = tensor
    args, kwargs = tree_map(lambda arg: inputs[arg.index] if isinstance(arg, Operand) else arg, (args, kwargs))
    graph.output(graph.call_function(resolve(op), args, kwargs))
    return graph


def with_casts(graph, autocast):
    """The graph that a region under autocast becomes."""
    made = fx.Graph()
    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs.append(made.node_copy(node))
    end = made.output(None)
    end.args = (copy_operators(None, graph, inputs, Place(made, end, autocast)),)
    return made


def run(graph, tensors):
    found = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*tensors)
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def like(tensor, floats):
    kinds = {torch.float64: floats, torch.complex128: torch.complex64}
    return tensor.detach().to(kinds.get(tensor.dtype, tensor.dtype))


def held(invocation, device, autocast, floats):
    """Compare one invocation; whether there was anything to compare: not all operators take half of the numbers."""
    args, kwargs, tensors = bound(invocation)
    mode = fake_mode()
    real = [like(tensor, floats) for tensor in tensors]
    fakes = [empty_like_on(tensor, device, mode) for tensor in real]
    graph = graph_of(invocation.op, args, kwargs, fakes)
    given = real if device == CPU else fakes
    with torch.no_grad(), mode if device == GPU else torch.no_grad():
        try:
            with autocast.region():
                expected = run(graph, given)
        except Exception:
            return False
        if device == CPU and invocation.op in INSIDE and floats != autocast.dtype:
            with pytest.raises(CaptureError, match="by casts within it"):
                with_casts(graph, autocast)
            return True
        found = run(with_casts(graph, autocast), given)
    assert [x.dtype for x in found] == [x.dtype for x in expected], (invocation.op, floats)
    if device == CPU and not row_of(invocation.op).draws:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return True


# Whose kernel for CPUs calls products that autocast casts in turn.
INSIDE = {"aten.bilinear.default"}
# What cannot be compared: torch refuses it under autocast, or has no kernel.
NOWHERE = {"cpu": {"aten.random.from"}, "cuda": {"aten.binary_cross_entropy.default", "aten.random.from"}}


def check(device, dtype, examples, operators=OPERATORS):
    compared: Counter[str] = Counter()
    autocast = Autocast(device.type, dtype)
    with gpu_autocast():
        for op, make in operators:

            def one(d, op=op, make=make):
                compared[op] += held(make(d, op), device, autocast, d.pick([FP32, dtype]))

            explore(examples, one)
    known = {op for op, _ in operators}
    assert known - set(+compared) == NOWHERE[device.type] & known


def test_some_operators_on_gpus():
    check(GPU, BF16, 1, OPERATORS[::20])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_operators_under_autocast(device, dtype):
    check(device, dtype, 4)
