"""Objects that no code may look at: plain PyTorch does not ask for what they raise at, nor do we."""

import functools
from collections import OrderedDict, deque

import torch
from torch import nn

from shardwright.compiler.capture.capture import capture
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.request import PlanRequest
from shardwright.runtime.graphs.remembered import Remembered


class Looked(Exception):
    """Somebody has looked."""


def refuse(*_, **__):
    raise Looked


LOOKS = (
    "__len__", "__iter__", "__eq__", "__ne__", "__bool__", "__repr__", "__str__", "__format__", "__contains__",
    "__getitem__", "__reversed__", "__lt__", "__int__", "__index__", "__float__", "__call__", "__dir__",
)  # fmt: skip
OF_DICTIONARIES = ("keys", "values", "items", "get", "copy")
HOSTILE = {"__hash__": object.__hash__, "__deepcopy__": lambda self, memo: self, **dict.fromkeys(LOOKS, refuse)}
UNSEEN = {"__getattribute__": refuse, "__class__": property(refuse), **HOSTILE}


def hostile(base, *more):
    """A class like ``base`` whose methods raise."""
    return type(f"Hostile{base.__name__.title()}", (base,), {**HOSTILE, **dict.fromkeys(more, refuse)})


class Property:
    value = property(refuse)

    def __getattr__(self, name):
        raise Looked(name)


def objects():
    numbers = [1, 2, 3]
    made = {kind.__name__: hostile(kind)(numbers) for kind in (list, tuple, set, frozenset, deque)}
    made |= {kind.__name__: hostile(kind, *OF_DICTIONARIES)({"a": 1}) for kind in (dict, OrderedDict)}
    made |= {kind.__name__: hostile(kind)(one) for kind, one in ((str, "a"), (int, 1), (float, 1.5), (bytes, b"a"))}
    return made | {
        "object": type("Hostile", (), HOSTILE)(),
        "unseen": type("Unseen", (), UNSEEN)(),
        "slots": type("Slots", (), {"__slots__": ("x",), **HOSTILE})(),
        "property": Property(),
        "partial": functools.partial(print, type("Hostile", (), HOSTILE)()),
        "unhashable": type("Unhashable", (), {**HOSTILE, "__hash__": refuse})(),
    }


def attributes():
    """Those that a module takes for an attribute."""
    return {name: each for name, each in objects().items() if name not in NO_ATTRIBUTES}


NO_ATTRIBUTES = ("unseen", "property")
beside = objects()


class Net(nn.Module):
    shared = type("Hostile", (), HOSTILE)()

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 1), 2.0
        for name, each in attributes().items():
            setattr(self, f"an_{name}", each)
        self.listed, self.named = list(objects().values()), objects()

    lazy = property(refuse)

    def forward(self, x):
        for name in attributes():
            getattr(self, f"an_{name}")
        _ = self.listed, self.named, self.shared, beside
        return self.layer(x) * self.scale


def test_a_step_among_objects_that_raise_is_captured_and_remembered():
    inside = objects()
    model, batch = Net(), torch.randn(6, 4)

    def loss_fn(model, batch):
        _ = inside
        return model(batch).square().mean()

    captured = capture(model, loss_fn, batch)
    assert make_plan(captured, PlanRequest(Mesh.of(d=2), "auto")).strategies
    remembered = Remembered(captured, model, loss_fn)
    assert remembered.holds()
    assert not remembered.changed()
    model.scale = 3.0
    assert not remembered.holds()
    assert remembered.changed() == {"model.scale": 3.0}
