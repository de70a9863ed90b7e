"""The time line of a step: what goes on at once, what waits, and when what is needed begins."""

import itertools
import random

import pytest

from shardwright.compiler.plan.timing.time_line import Begun, Work, awaits, begins, does, time_line, with_prefetch


def computing(seconds, name="f"):
    return does(Work("computing", False, name, seconds))


def begun(seconds, size=1, name="w"):
    return Begun(Work("communicating", False, name, seconds), size)


def at_once(seconds, name="x"):
    return does(Work("communicating", False, name, seconds))


def spans(line, stream):
    """What a stream does, in order: names, from when to when."""
    found = [(e.work.operator, e.start_s, e.end_s) for e in line.events if e.work.stream == stream]
    return [(name, pytest.approx(start), pytest.approx(end)) for name, start, end in sorted(found, key=lambda e: e[1])]


def test_what_was_begun_goes_on_beside_computing_and_both_are_slower():
    w = begun(2.0)
    line = time_line([begins(w), computing(3.0), awaits(w), computing(1.0)], 0.75)
    assert line.together_s == 2.0
    assert spans(line, "communicating") == [("w", 0, 2.5)]
    assert spans(line, "computing") == [("f", 0, 3.5), ("f", 3.5, 4.5)]
    assert line.end_s == pytest.approx(3 + 1 + 2 - 0.75 * 2)


def test_what_is_needed_is_waited_for_and_the_rest_at_the_end():
    w, v = begun(4.0), begun(1.0, name="v")
    line = time_line([begins(w), computing(1.0), awaits(w), computing(2.0), begins(v)], 1.0)
    assert spans(line, "computing") == [("f", 0, 1), ("f", 4, 6)]
    assert spans(line, "communicating") == [("w", 0, 4), ("v", 6, 7)]
    assert (line.together_s, line.end_s) == (1.0, 7.0)


def test_one_goes_on_after_the_other_and_stands_still_where_others_need_the_links():
    w, v = begun(2.0), begun(2.0, name="v")
    acts = [begins(w), begins(v), computing(1.0), at_once(5.0), computing(2.0), awaits(v), computing(1.0)]
    line = time_line(acts, 1.0)
    assert spans(line, "communicating") == [("w", 0, 1), ("x", 1, 6), ("w", 6, 7), ("v", 7, 9)]
    assert spans(line, "computing") == [("f", 0, 1), ("f", 6, 8), ("f", 9, 10)]
    assert line.together_s == 3.0


def drawn_acts(draw):
    acts, under_way = [], []
    for _ in range(draw.randint(1, 25)):
        kind, seconds = draw.choice("cbwx"), draw.choice([0.5, 1.0, 3.0]) * draw.random()
        if kind == "b":
            under_way.append(begun(seconds))
            acts.append(begins(under_way[-1]))
        elif kind == "w" and under_way:
            acts.append(awaits(under_way.pop(draw.randrange(len(under_way)))))
        else:
            acts.append(at_once(seconds) if kind == "x" else computing(seconds))
    return acts


@pytest.mark.parametrize("seed", range(30))
def test_a_step_takes_what_it_does_less_what_is_hidden_of_what_it_does_at_once(seed):
    draw = random.Random(seed)
    acts, hides = drawn_acts(draw), draw.random()
    line = time_line(acts, hides)
    works = [act.of if isinstance(act.of, Work) else act.of.work for act in acts if act.kind != "awaits"]
    assert line.end_s == pytest.approx(sum(work.seconds for work in works) - hides * line.together_s)
    for stream in ("computing", "communicating"):
        done = sorted((e.start_s, e.end_s) for e in line.events if e.work.stream == stream)
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(done))
    beside = sum(work.seconds for work in works if work.stream == "computing")
    may = sum(act.of.work.seconds for act in acts if act.kind == "begins")
    assert line.together_s <= min(beside, may) + 1e-12


def prefetched(waits, most_bytes, **options):
    """What begins and what is waited for, in order, of (seconds, bytes) each of which a second's computing needs."""
    made = [begun(seconds, size, str(number)) for number, (seconds, size) in enumerate(waits)]
    acts = with_prefetch([act for of in made for act in (awaits(of), computing(1.0))], most_bytes, **options)
    return "".join({"does": ".", "begins": "b", "awaits": "w"}[act.kind] for act in acts), acts


def test_what_is_needed_begins_as_late_as_it_takes_for_nothing_to_wait():
    order, acts = prefetched([(0.5, 1)] * 4, 9)
    assert order == "bwb.wb.wb.w."
    line = time_line(acts, 1.0)
    assert line.end_s == pytest.approx(4.5)  # the first has nothing to go on beside
    assert prefetched([(0.1, 1), (0.1, 1), (1.5, 1)], 9)[0] == "bwbb.w.w."


def test_what_takes_longer_than_all_before_it_begins_with_the_step():
    order, acts = prefetched([(0.0, 1), (0.0, 1), (5.0, 1)], 9)
    assert order == "bbbw.w.w."
    assert time_line(acts, 1.0).end_s == pytest.approx(6.0)


def test_no_more_bytes_are_made_before_their_turn_than_may_be():
    assert prefetched([(5.0, 3)] * 4, 12)[0] == "bbbbw.w.w.w."
    assert prefetched([(5.0, 3)] * 4, 11)[0] == "bbbwb.w.w.w."
    assert prefetched([(5.0, 3)] * 4, 5)[0] == "bwb.wb.wb.w."
    assert prefetched([(5.0, 3)] * 4, 2)[0] == "bw.bw.bw.bw."
    assert prefetched([(5.0, 1)] * 4, 99, one_ahead=True)[0] == "bwb.wb.wb.w."


def test_what_has_begun_begins_once():
    w = begun(1.0)
    acts = [begins(w), computing(1.0), awaits(w)]
    assert with_prefetch(acts, 9) == acts
