"""Data parallelism between hosts: each rank looks up the rows of all in what is much larger than they are."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rows import slow
from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import shipped
from shardwright.compiler.plan.request import PlanRequest
from whole import plain, run

WORDS, WIDTH, LENGTH = 400, 6, 3


class Tied(nn.Module):
    """Words in, words out, by one table of them unless they are ``apart``."""

    def __init__(self, apart, padding):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=padding), nn.Embedding(LENGTH, WIDTH)
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if not apart:
            self.out.weight = self.words.weight

    def forward(self, words):
        return self.out(torch.tanh(self.inner(self.words(words) + self.places(torch.arange(LENGTH)))))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@cache
def captured(rows, apart, padding):
    """A model, its batch and its graph, which all plans of them share."""
    torch.manual_seed(rows)
    model = Tied(apart, padding).double()
    batch = torch.randint(WORDS, (rows, LENGTH)), torch.randint(WORDS, (rows, LENGTH))
    return model, batch, captured_step(model, loss_fn, batch, {})


def planned(rows, ranks, apart=False, padding=None, hosts=True):
    hardware = replace(shipped("cpu_host_shm"), ranks_per_host=2 if hosts else None)
    model, batch, graph = captured(rows, apart, padding)
    return make_plan(graph, PlanRequest(Mesh.of(ranks=ranks), "data", hardware=hardware)), model, batch


def reduced(plan):
    """The parameters whose gradients are added up over the ranks, as far as operators that are split have made them."""
    return {plan.capture.values[t.value].label: {node for node, _ in t.consumers} for t in plan.transfers
            if t.steps and plan.capture.values[t.value].kind == "parameter"}  # fmt: skip


@pytest.mark.parametrize("ranks", [3, *slow(2, 6)])
@pytest.mark.parametrize(("apart", "padding"), [(False, None), (True, 1)])
def test_gradients_are_those_of_one_device(ranks, apart, padding):
    """Also of rows that do not divide evenly, and where some ranks have none."""
    plan, model, batch = planned(4, ranks, apart, padding)
    found, expected = run(plan, model, batch), plain(model, loss_fn, batch)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_the_table_of_words_is_not_reduced_for_lookups():
    """That of a table which words come out of begins with the backward; one by itself is not reduced at all."""
    tied, apart = reduced(planned(4, 4)[0]), reduced(planned(4, 4, apart=True)[0])
    assert "words.weight" not in apart
    assert "out.weight" in apart
    assert not any("embedding" in node for node in tied["words.weight"])


@pytest.mark.parametrize(("rows", "hosts"), [(4, False), (40, True)])
def test_on_one_host_or_of_many_rows_it_is_reduced_as_others(rows, hosts):
    assert "words.weight" in reduced(planned(rows, 4, apart=True, hosts=hosts)[0])
