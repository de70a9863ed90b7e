"""Hangs of ranks whose collectives run on a GPU: what it has done counts, and not what it was asked for."""

import json
import time

import pytest

from shardwright.common.pulse import PulseFile, open_pulse, site
from shardwright.distributed.device_reports import Follower, recorded
from shardwright.launch.hangs.stacks import Frame, Observation, Target, observe
from shardwright.launch.hangs.stall_report import report_text
from shardwright.launch.hangs.stall_verdict import Hang, location_of

LOADING = (Frame("/w/train.py", 8, "load"),)


class Device:
    """A GPU that has done as much as it is told to; its marks are numbered."""

    def __init__(self):
        self.done = self.marks = 0

    def mark(self):
        self.marks += 1
        return Mark(self, self.marks)


class Mark:
    def __init__(self, device, number):
        self.device, self.number = device, number

    def query(self):
        return self.device.done >= self.number


@pytest.fixture
def rank():
    """A rank with a GPU that has been asked for three collectives of two steps, with the supervisor's end."""
    file, device = PulseFile(), Device()
    pulse = open_pulse.__wrapped__(file.path)
    pulse.follow(device.mark)
    for step, words in ((1, "linear"), (1, "the loss"), (2, "linear")):
        if step > pulse._steps:
            pulse.begin_step()
        pulse.at(site(words, 1 + len(words)))
        with pulse.inside(b"all_reduce"):
            pass
    pulse.look()
    return file, device, pulse


def seen(file, number=0, frames=LOADING):
    stacks = (frames,) if frames else ()
    return Observation(number, 100 + number, "S", busy=1.0, pulse=file.read(), stacks=stacks, stacks_by="x")


@pytest.mark.parametrize(
    ("done", "kind", "text", "queued"),
    [
        (0, "known", "computing on its GPU, before all_reduce of step 1 for linear", 3),
        (1, "waiting", "in all_reduce of step 1 for linear", 3),
        (3, "waiting", "in all_reduce of step 1 for the loss", 2),
        (5, "waiting", "in all_reduce of step 2 for linear", 1),
        (6, "known", "in train.py:8 in load (step 2), computing", 0),
    ],
)
def test_a_rank_is_where_its_gpu_is_and_not_where_its_program_is(rank, done, kind, text, queued):
    file, device, pulse = rank
    device.done = done
    pulse.look()
    place = location_of(seen(file))
    assert (place.kind, place.text, file.read().queued) == (kind, text, queued)
    assert file.read().collectives == 3


def test_what_a_gpu_ends_is_a_sign_of_life(rank):
    file, device, pulse = rank
    before = file.read().beats
    pulse.look()
    assert file.read().beats == before
    device.done = 2
    pulse.look()
    assert file.read().beats > before


def test_the_rank_whose_gpu_never_came_is_blamed(rank):
    file, device, pulse = rank
    device.done = 1
    pulse.look()
    waiting = [seen(file, number) for number in (0, 1)]
    device.done = 0
    pulse.look()
    verdict, blamed = Hang((*waiting, seen(file, 2)), 30.0).verdict()
    assert blamed == (2,)
    assert verdict == (
        "rank 2 is computing on its GPU, before all_reduce of step 1 for linear while 2 ranks wait in all_reduce of "
        "step 1 for linear"
    )


def after(*steps, stage=0):
    """A rank whose GPU is in the first collective of the next step, after steps of these collectives."""
    file, device = PulseFile(), Device()
    pulse = open_pulse.__wrapped__(file.path)
    pulse.set_stage(stage)
    pulse.follow(device.mark)
    for operations in (*steps, [b"all_reduce"]):
        pulse.begin_step()
        for operation in operations:
            pulse.at(site("linear", 1))
            with pulse.inside(operation):
                pass
    device.done = device.marks - 1
    pulse.look()
    return file


SAME, OTHER, FEWER = [b"all_gather", b"all_reduce"], [b"all_reduce", b"all_gather"], [b"all_gather"]


@pytest.mark.parametrize(
    ("ranks", "said", "blamed"),
    [
        ([[SAME, SAME]] * 3, "", ()),
        ([[SAME, SAME], [SAME, FEWER], [SAME, SAME]],
         "; rank 1 began other collectives in step 2 than the rest: 1 of them, and the rest 2", (1,)),
        ([[SAME, SAME], [SAME, SAME], [OTHER, FEWER]],
         "; rank 2 began other collectives in step 1 than the rest: 2 of them, and the rest 2", (2,)),
        ([[SAME, SAME], [SAME, FEWER]],
         "; in step 2 ranks did not begin the same collectives: rank 0 2, rank 1 1", ()),
        # Of step 1, which some have forgotten, nothing can be said; nor of a rank that has no step behind it.
        ([[SAME, SAME], [OTHER, SAME, SAME], [SAME, SAME]], "", ()),
        ([[SAME, SAME], [OTHER, SAME], []], "", ()),
    ],
)  # fmt: skip
def test_who_began_other_collectives_than_the_rest_is_named_where_all_gpus_wait(ranks, said, blamed):
    found = Hang(tuple(seen(after(*steps), number) for number, steps in enumerate(ranks)), 30.0)
    verdict, odd = found.verdict()
    assert verdict.endswith(said) if said else "collectives in step" not in verdict
    if said:
        assert odd == blamed
    if ranks[0] == ranks[-1]:
        assert "collectives that step 2 began: 2, with checksum " in report_text(found)


def test_ranks_of_one_pipeline_stage_are_compared():
    def hang(*ranks):
        return Hang(tuple(seen(after(step, stage=stage), number) for number, (stage, step) in enumerate(ranks)), 30.0)

    same = hang((0, SAME), (0, SAME), (1, FEWER), (1, FEWER))
    assert same.other_calls() == ("", ())
    assert same._fewest_collectives() == ()
    assert same.verdict()[1] == ()
    text, odd = hang((0, SAME), (0, SAME), (1, FEWER), (1, SAME), (1, FEWER)).other_calls()
    assert text == "rank 3 began other collectives in step 1 than the rest: 2 of them, and the rest 1"
    assert odd == (3,)


def test_a_gpu_that_waits_for_what_was_begun_before_is_in_that(rank):
    file, device, pulse = rank
    device.done = 6
    pulse.look()
    pulse.note(b"all_reduce")
    pulse.note(b"")
    device.done = 7
    pulse.look()
    assert location_of(seen(file)).text == "in all_reduce of step 2 for linear"
    assert file.read().collectives == 3


def test_a_rank_without_a_gpu_is_where_its_program_is():
    file = PulseFile()
    with open_pulse.__wrapped__(file.path).inside(b"all_reduce"):
        assert location_of(seen(file)).text == "in all_reduce"


def entry(number, state, group="world", **more):
    return {
        "process_group": ["0", group], "profiling_name": "nccl:all_reduce", "collective_seq_id": number,
        "input_sizes": [[4, 8]], "input_dtypes": ["Float"], "state": state, "is_p2p": False,
        "frames": [{"name": "f", "filename": "/w/train.py", "line": number}],
    } | more  # fmt: skip


def test_what_torch_has_recorded_comes_into_the_report(rank):
    file, _, pulse = rank
    dump = json.dumps({"entries": [entry(number, "completed") for number in range(9)] + [entry(9, "started")]})
    follower = Follower(pulse, lambda: time.sleep(0.5) or recorded(dump))  # it may take its time
    try:
        [found] = observe({0: Target(0x7FFFFFFF, file)})
    finally:
        follower.end()
    assert [line.split(" is ")[1] for line in found.recorded] == [
        "completed (train.py:6)", "completed (train.py:7)", "completed (train.py:8)", "started (train.py:9)",
    ]  # fmt: skip
    text = report_text(Hang((found,), 30.0))
    assert "collectives that its GPU was asked for and has not ended: 3" in text
    assert "what torch has recorded of its collectives:\n  world: all_reduce 6 of Float[4, 8] is completed" in text


def test_a_record_in_another_form_is_told_and_none_is_empty():
    assert recorded(b"{}") == ""
    assert recorded("x").startswith("what torch has recorded cannot be read: JSONDecodeError")
    assert recorded(json.dumps({"entries": [{"state": "x"}]})).startswith("what torch has recorded cannot be read: Key")


def test_a_rank_without_a_gpu_is_not_asked():
    file = PulseFile()
    [found] = observe({0: Target(0x7FFFFFFF, file)})
    assert found.recorded == ()
    assert file.recorded() == "", "nothing was asked"
