"""The talk between launcher, agents and supervisors: messages, and writing that never waits, without processes."""

import os
import selectors

import pytest

from shardwright.launch.host.agent_protocol import AGENT_EVENTS, AGENT_ORDERS, Check, TooOld
from shardwright.launch.host.program import Program
from shardwright.launch.host.protocol import CarrierOutput, Ended, Exited, Kill, LogRetention, Output, OutputTail, Start
from shardwright.launch.host.stream import Decoder, Writer, encode


def test_messages_survive_any_cut():
    sent = [
        Output(1, "stdout", b'a\n{"x"'),
        Ended((), (7,)),
        CarrierOutput("é", True),
        OutputTail(2, "stderr", bytes(300)),
    ]
    stream = b"".join(encode(message) for message in sent)
    for size in (1, 2, 7, 64, 10_000):
        decoder = Decoder(Output, Ended, CarrierOutput, OutputTail)
        got = [m for i in range(0, len(stream), size) for m in decoder.feed(stream[i : i + size])]
        assert got == sent
        assert [type(message) for message in got] == [Output, Ended, CarrierOutput, OutputTail]


def test_what_to_start_survives_the_stream():
    start = Start(
        Program("module", ("a.b", "-x")),
        True,
        {0: {"RANK": "0"}, 3: {"RANK": "3"}},
        (7, 8),
        kept=LogRetention("/l", (0,), ""),
    )
    [message] = Decoder(Start).feed(encode(start))
    assert message == start


def test_what_to_check_survives_the_stream():
    program = Program("script", ("train.py", "--lr", "1"))
    check = Check("/w", None, program, True, False, 29500, False, {"A": "b"}, 10.0, "word")
    [message] = Decoder(*AGENT_ORDERS).feed(encode(check))
    assert message == check


def test_every_message_has_a_name_of_its_own():
    for classes in (AGENT_ORDERS, AGENT_EVENTS):
        assert len({one.__name__ for one in classes}) == len(classes)
        assert all(one.__doc__ for one in classes)


def test_what_stands_in_for_an_agent_is_understood():
    """It is written by a program that any Python understands (`packed`)."""
    [message] = Decoder(*AGENT_EVENTS).feed(b'{"message": "TooOld", "python": "2.7"}\n')
    assert message == TooOld("2.7")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (encode(Kill()), "a message 'Kill' came, expected one of Output, Exited$"),
        (b'{"event": "output"}\n', "a message None came, expected one of Output, Exited$"),
        (
            b'{"message": "Exited", "rank": 1, "status": 3}\n',
            "a message Exited came with rank, status, expected rank, code, time_s, signalled, out_of_memory, error$",
        ),
        (b'{"message": "Output"}\n', "a message Output came with nothing, expected rank, stream, data$"),
    ],
)
def test_a_message_that_is_none_is_named(line, message):
    with pytest.raises(ValueError, match=message):
        list(Decoder(Output, Exited).feed(line))


# --- writing


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    for fd in (read, write):
        os.close(fd)


def test_what_the_other_end_does_not_take_is_written_from_the_loop(pipe):
    read, write = pipe
    sent = os.urandom(500_000)
    writer = Writer(write, gone=lambda: pytest.fail("it is there"))
    writer.put_now(sent[:400_000])
    assert 0 < writer.waiting_bytes < 400_000, "what fits into the pipe was written at once"
    writer.put_now(sent[400_000:])
    came = b""
    with selectors.DefaultSelector() as selector:
        writer.attach(selector)
        while writer.waiting_bytes:
            came += os.read(read, 1 << 20)
            for key, _ in selector.select(1.0):
                key.data()
        assert not selector.get_map(), "nobody asks whether it can be written when nothing waits"
        came += os.read(read, 1 << 20)
    assert came == sent


def test_what_is_put_waits_for_the_loop(pipe):
    read, write = pipe
    writer = Writer(write, gone=lambda: None)
    with selectors.DefaultSelector() as selector:
        writer.attach(selector)
        writer.put(b"ab")
        writer.detach()
        writer.put(b"c")
        assert not selector.get_map()
        assert writer.waiting_bytes == 3
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        writer.attach(selector)
        [(key, _)] = selector.select(1.0)
        key.data()
    assert os.read(read, 10) == b"abc"


def test_more_comes_when_all_that_waited_is_taken(pipe):
    read, write = pipe
    pieces = [b"c", b"b"]
    writer = Writer(write, gone=lambda: None, more=lambda: pieces.pop() if pieces else b"")
    with selectors.DefaultSelector() as selector:
        writer.attach(selector)
        writer.put_now(b"a")
        while writer.waiting_bytes:
            for key, _ in selector.select(1.0):
                key.data()
    assert os.read(read, 10) == b"abc"


def test_an_end_that_is_gone_is_told_and_what_waits_for_it_forgotten():
    read, write = os.pipe()
    told = []
    writer = Writer(write, gone=lambda: told.append("gone"))
    with selectors.DefaultSelector() as selector:
        writer.attach(selector)
        writer.put(b"a")
        os.close(read)
        for key, _ in selector.select(1.0):
            key.data()
        assert not selector.get_map()
    assert (told, writer.waiting_bytes) == (["gone"], 0)
    os.close(write)
