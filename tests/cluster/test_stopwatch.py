"""What a GPU takes is measured by its own events, and what bounds a collective as the collective is."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.cluster.bench import roofline
from shardwright.cluster.bench.stopwatch import took_s

GPU = torch.device("cuda", 0)


class Gpu:
    """A GPU with a queue, whose work takes 5 ms each and begins when it is waited for."""

    def __init__(self):
        self.queue, self.clock_ms = [], 0.0

    def event(self):
        event = SimpleNamespace(at_ms=None)

        def record():
            self.queue.append(event)

        def wait():
            for task in self.queue:
                if isinstance(task, float):
                    self.clock_ms += task
                else:
                    task.at_ms = self.clock_ms
            self.queue.clear()

        event.record, event.synchronize = record, wait
        event.elapsed_time = lambda end: end.at_ms - event.at_ms
        return event


def test_what_a_gpu_was_asked_for_is_timed_by_the_gpu():
    gpu = Gpu()
    gpu.queue.append(100.0)  # what it still has to do is no part of it
    assert took_s(lambda: gpu.queue.extend([5.0, 5.0]), GPU, gpu.event) == pytest.approx(0.010)
    assert gpu.queue == []


def test_a_copy_is_timed_as_a_collective_is_and_the_fastest_way_counts(monkeypatch):
    """Behind one barrier for each way, the mean of a loop of as many calls, after as many others."""
    done, met = [], []

    def way(seconds):
        return lambda: done.append(seconds)

    def took(run, device):
        before = len(done)
        run()
        return sum(done[before:])

    monkeypatch.setattr(roofline, "_ways", lambda source, target: [way(0.5), way(0.25)])
    monkeypatch.setattr(roofline, "took_s", took)
    assert roofline.copy_s(1000, torch.device("cpu"), 2, 3, lambda: met.append(len(done))) == 0.25
    assert met == [2, 7]
    assert done == [0.5] * 5 + [0.25] * 5


def test_every_way_to_copy_copies():
    for number in range(2):
        source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
        roofline._ways(source, target)[number]()
        assert target.equal(source)
