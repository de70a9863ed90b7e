"""Models of transformers that compute in float64 throughout: as they are, norms and routers compute in float32."""

from __future__ import annotations

import inspect
import sys
import textwrap
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import transformers
from families import FAMILIES
from torch import nn

NAMED = {family.name: family for family in FAMILIES}
WIDTH, WORDS = 8, 32  # of a head of a Llama, and of its vocabulary


def llama(heads: int, keys: int, length: int, layers: int = 2, **config: Any) -> nn.Module:
    """Return a Llama with a norm of torch's, and without the loss of its own."""
    torch.manual_seed(0)
    made = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH * heads, intermediate_size=16 * heads, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, max_position_embeddings=length, **config,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(made).double().train()
    for name, norm in list(model.named_modules()):
        if name.endswith("norm"):
            parent, _, last = name.rpartition(".")
            exact = nn.RMSNorm(WIDTH * heads, eps=norm.variance_epsilon, dtype=torch.float64)
            setattr(model.get_submodule(parent), last, exact)
    return model


def mixture(name: str, layers: int = 1) -> nn.Module:
    """Return a small mixture of experts of few layers, whose experts are a grouped product."""
    family = NAMED[name]
    changed = {"num_hidden_layers": layers, "first_k_dense_replace": 0}
    model = replace(family, config={**family.config, **changed}).model().double()
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "Router")):
            source = textwrap.dedent(inspect.getsource(type(module).forward))
            for narrow, wide in (("float32", "float64"), ("dtype=torch.float,", "dtype=torch.float64,"),
                                 (".float()", ".double()")):  # fmt: skip
                source = source.replace(narrow, wide)
            scope = dict(vars(sys.modules[type(module).__module__]))
            exec(source, scope)
            module.forward = MethodType(scope["forward"], module)
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        more = {"output_router_logits": True} if "mixtral" in name else {}
        model(torch.zeros(1, 2, dtype=torch.long), **more)  # transformers installs hooks in the first call
    model.config._experts_implementation = "grouped_mm"
    return model
