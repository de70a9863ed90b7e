"""Traces of chosen steps."""

import json

import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.compiler.report.traces import merged
from shardwright.errors import UsageError


def trace(rank, base_ns):
    events = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "X", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 10.0 + rank, "dur": 5},
        {"ph": "s", "name": "fwdbwd", "id": 3, "pid": 7, "tid": 7, "ts": 11.0},
    ]
    return {"schemaVersion": 1, "baseTimeNanoseconds": base_ns, "traceEvents": events}


def test_traces_of_ranks_become_processes_of_one_on_one_clock():
    one = merged([trace(0, 1_000_000), trace(1, 1_500_000)])
    events = {(event["name"], event["pid"]): event for event in one["traceEvents"]}
    assert len(events) == 6
    assert [events["process_name", pid]["args"]["name"] for pid in (1, 2)] == ["rank 0: python", "rank 1: python"]
    assert [events["aten::mm", pid]["ts"] for pid in (1, 2)] == [10.0, 511.0]
    assert events["fwdbwd", 1]["id"] != events["fwdbwd", 2]["id"]


def test_numbers_that_are_no_steps_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"numbers of steps from 1 on, got \[0, 2\]"):
        sw.Tracer(tmp_path, [0, 2])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


def traced(folder):
    torch.set_num_threads(1)
    sw.init()
    torch.manual_seed(0)
    pins = {"up": ((1, 1), (2, 1)), "down": ((1, 2), (1, 2))}
    batches = [torch.randn(4, 8) for _ in range(5)]
    parallel = sw.parallelize(
        Net(), lambda m, x: m(x).square().mean(), batches[0], "semi-auto", mesh="tp=2", pins=pins, batch="global"
    )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    trainer = sw.Trainer(parallel, optimizer, [sw.Tracer(folder, [2, 3, 5])])
    trainer.fit(batches)


@pytest.mark.slow
def test_collectives_have_the_names_of_what_they_are_for(tmp_path):
    run_ranks(2, traced, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.2.json", "trace.5.json"]
    events = json.loads((tmp_path / "trace.2.json").read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    collectives = [event for event in events if event["name"] == "all_gather for linear of up"]
    assert {processes[event["pid"]].partition(":")[0] for event in collectives} == {"rank 0", "rank 1"}
    assert any(event["name"].startswith("aten::") for event in events)
