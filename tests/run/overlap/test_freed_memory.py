"""A step on a CPU takes the memory that the last one has freed."""

import resource
from types import SimpleNamespace

import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.run import captured, freed_memory

PAGES = 3 * 2**24 // resource.getpagesize()


def pages_taken():
    """How many pages the kernel maps at least while tensors of as many as `PAGES` are made again."""

    def made():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(2**22) for _ in range(3)]
        del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return min([made() for _ in range(4)][1:])


def taken_before_and_after():
    torch.set_num_threads(1)
    before = pages_taken()
    freed_memory.keep_freed_memory()
    after, calls = pages_taken(), []
    captured.keep_freed_memory = lambda: calls.append("by a model")
    sw.init()
    sw.parallelize(nn.Linear(3, 2), lambda model, x: model(x).sum(), torch.ones(2, 3), batch="global")
    return before, after, calls


def test_freed_memory_is_kept_where_a_model_runs():
    [(before, after, calls)] = run_ranks(1, taken_before_and_after)
    assert before > PAGES / 5  # the allocator learns a little by itself
    assert after < PAGES / 10
    assert calls == ["by a model"]


def test_what_the_user_has_told_the_allocator_stays(monkeypatch):
    told = []
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *what: told.append(what)))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    freed_memory.keep_freed_memory()
    assert told == []
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    freed_memory.keep_freed_memory()
    assert len(told) == 2
