"""Hosts are read as OpenMPI, DeepSpeed and Slurm write them, and what is wrong is named with its place."""

import ipaddress
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright.launch.hosts.hosts as hosts_module
from shardwright.errors import UsageError, WorldError
from shardwright.launch.hosts.hosts import MOST_SLOTS, Host, Hosts, expand_hosts, expand_tasks, is_this_host

names = st.one_of(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,12}", fullmatch=True), st.ip_addresses().map(str))
users = st.none() | st.from_regex(r"[a-z_][a-z0-9_.-]{0,8}", fullmatch=True)


def host_lists(slots):
    hosts = st.builds(Host, name=names, slots=slots, user=users)
    return st.lists(hosts, min_size=1, max_size=6, unique_by=lambda host: host.name).map(lambda h: Hosts(tuple(h)))


known = st.integers(1, MOST_SLOTS)


@settings(deadline=None, max_examples=25)  # the machine may be busy
@given(host_lists(known))
def test_a_list_reads_as_it_was_written(hosts):
    assert Hosts.from_list(hosts.to_list()) == hosts


@settings(deadline=None, max_examples=25)
@given(hosts=host_lists(st.none() | known))
def test_a_hostfile_reads_as_it_was_written(hosts, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "written"
    path.write_text(hosts.to_hostfile())
    assert Hosts.from_hostfile(path) == hosts


@settings(deadline=None, max_examples=40)
@given(parts=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=9))
def test_duplicates_add_up_in_the_order_of_their_first(parts):
    hosts = Hosts.from_list(",".join(f"{name}:{slots}" for name, slots in parts))
    assert [h.name for h in hosts] == list(dict.fromkeys(name for name, _ in parts))
    assert {h.name: h.slots for h in hosts} == {n: sum(s for m, s in parts if m == n) for n, _ in parts}
    assert hosts.slots == sum(slots for _, slots in parts)


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        hosts = Hosts.from_list(text)
    except UsageError:
        return
    assert Hosts.from_list(hosts.to_list()) == hosts


def read(tmp_path, text):
    path = tmp_path / "hosts.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Hosts.from_hostfile(path)


def test_a_hostfile_as_people_write_them(tmp_path):
    text = (
        "\ufeff# rack 1\r\n\r\n  a slots=8   # eight\r\nbob@b.local slots = 4 max_slots=4\r\nc\r\n"
        "[fd00:0::1] slots=2\r\na slots=1\n"
    )
    assert read(tmp_path, text).hosts == (
        Host("a", 9), Host("b.local", 4, "bob"), Host("c", None), Host("fd00::1", 2),
    )  # fmt: skip
    assert str(read(tmp_path, text)) == "4 hosts, unknown slots: a:9, bob@b.local:4, c:?, [fd00::1]:2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a slots=0", "got '0' slots, expected a whole number from 1 to 99999, as in `[user@]host [slots=N]`"),
        ("a slots=", "got '' slots, expected a whole number from 1"),
        ("a slots=four", "got 'four' slots, expected a whole number"),
        ("a slots=9999999999999", "expected a whole number from 1 to 99999"),
        ("a slot=4", "got 'slot=4' after a, expected `[user@]host [slots=N]`"),
        ("a 4", "got '4' after a, expected `[user@]host [slots=N]`"),
        ("a slots=1 slots=2", "got 'slots=2' after a"),
        ("a:4", "got 'a:4', expected `[user@]host [slots=N]`: type `a slots=N`"),
        ("a slots=4 max_slots=2", "got max_slots=2, expected it beside slots that are not more"),
        ("-oProxyCommand=x", "got the host '-oProxyCommand=x', expected"),
        ("-l@a", "got the user '-l', expected"),
        ("@a", "got the user '', expected"),
        ("fd00::1 slots=2", "got 'fd00::1', expected an IPv6 address in brackets: type [fd00::1]"),
        ("[fd00::1 slots=2", "expected an IPv6 address in brackets as [fd00::1]"),
        ("[a] slots=2", "got '[a]', expected an IPv6 address in brackets"),
        ("first slots=1", "got first again, after {path}:2: the slots of a host add up"),
        ("bob@third slots=1", "got bob@third, but {path}:3 has third: expected one user"),
        ("third slots=99999", "got '100000' slots"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(UsageError) as refused:
        read(tmp_path, f"# one\nfirst\nthird slots=1\n{line}\nlast slots=4\n")
    path = tmp_path / "hosts.txt"
    assert str(refused.value).startswith(f"{path}:4: got ")
    assert message.format(path=path) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"# nothing\n", "names no host; expected lines like `[user@]host [slots=N]`"),
        (b"", "names no host"),
        (b"a\xff slots=2", "is no text: byte 1 is no UTF-8"),
        (b"a\0b slots=2", "got the host 'a\\x00b'"),
        (b"#" * (2**24 + 1), "has more than 16777216 bytes"),
    ],
)
def test_a_file_that_is_no_hostfile(tmp_path, text, message):
    with pytest.raises(UsageError) as refused:
        read(tmp_path, text)
    assert message in str(refused.value)


def test_a_hostfile_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="nothere cannot be read: No such file"):
        Hosts.from_hostfile(tmp_path / "nothere")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        Hosts.from_hostfile(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "-H : got the host '', expected [user@]host[:slots]"),
        ("a,,b", "-H a,,b: '': got the host ''"),
        ("a:0", "-H a:0: got '0' slots"),
        ("a:", "-H a:: got '' slots"),
        ("a:2:3", "got '2:3' slots"),
        ("a;reboot", "got the host 'a;reboot'"),
        ("a b", "got the host 'a b'"),
        ("::1:2", "got '::1:2', expected an IPv6 address in brackets: type [::1:2]"),
        ("[::1]2", "got '[::1]2', expected an IPv6 address in brackets"),
        ("[fe80::1%-o]", "expected an IPv6 address in brackets"),
        ("x@a,y@a", "-H x@a,y@a: 'y@a': got y@a, but -H x@a,y@a: 'x@a' has x@a: expected one user"),
    ],
)
def test_a_bad_list_is_named(text, message):
    with pytest.raises(UsageError) as refused:
        Hosts.from_list(text)
    assert message in str(refused.value)


def test_a_list_cannot_say_as_many_as_cpus():
    with pytest.raises(UsageError, match="-H cannot say that alice@a has as many slots as CPUs"):
        Hosts((Host("alice", 2), Host("a", None, "alice"))).to_list()


def test_this_host_by_name_and_address():
    assert all(is_this_host(name) for name in ("localhost", "127.0.0.1", "127.1.2.3", socket.gethostname()))
    # A reserved address (RFC 1112), one for documentation (RFC 3849), a multicast one, and the one that means any.
    assert not any(is_this_host(name) for name in ("240.0.0.1", "2001:db8::1", "224.0.0.1", "0.0.0.0", "::"))


def test_a_name_server_that_is_away_holds_nobody(monkeypatch):
    real, over = socket.getaddrinfo, threading.Event()

    def away(name, *arguments, **options):
        if name == "far.example":
            over.wait(60)
        return real("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", away)
    monkeypatch.setattr(hosts_module, "_RESOLVE_TIMEOUT_S", 60.0)
    assert is_this_host("near.example")
    monkeypatch.setattr(hosts_module, "_RESOLVE_TIMEOUT_S", 0.05)
    assert not is_this_host("far.example")
    over.set()


prefixes = st.from_regex(r"[a-z]{1,4}", fullmatch=True)


@settings(deadline=None, max_examples=40)
@given(
    prefix=prefixes,
    spans=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5)), min_size=1, max_size=4),
    tasks=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_slurm_lists_are_expanded(prefix, spans, tasks):
    text = ",".join(f"{first:02}-{first + more:02}" if more else f"{first:02}" for first, more in spans)
    expected = [f"{prefix}{n:02}" for first, more in spans for n in range(first, first + more + 1)]
    assert expand_hosts(f"{prefix}[{text}]") == expected
    assert expand_hosts(",".join(expected)) == expected
    written = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in tasks)
    assert expand_tasks(written) == [count for count, times in tasks for _ in range(times)]


@pytest.mark.parametrize(
    ("nodelist", "tasks", "message"),
    [
        ("a[1-2]", "4", "a[1-2] are 2 hosts, but 4 gives the tasks of 1"),
        ("a[2-1]", "1", "'2-1' in the Slurm node list 'a[2-1]' runs backwards"),
        ("a]1[", "1", "cannot be read; expected names like gnode[10,20-25]"),
        ("a" * 50 + "[", "1", "cannot be read"),
        ("a,,b", "1(x3)", "cannot be read"),
        ("node," * 30_000, "1", "cannot be read"),
        ("a[0-999999999]", "1", "stands for 1000000000 hosts; expected at most 100000"),
        ("a[0-999]b[0-999]", "1", "stands for 1000000 hosts"),
        ("a", "1(x999999999)", "stands for 999999999 hosts"),
        ("a", "one", "SLURM_TASKS_PER_NODE='one' cannot be read"),
    ],
)
def test_bad_slurm_lists_are_named(nodelist, tasks, message):
    with pytest.raises(WorldError) as refused:
        Hosts.from_slurm(nodelist, tasks)
    assert message in str(refused.value)


def test_addresses_are_written_one_way():
    assert Hosts.from_list("[FD00:0:0::1]:2,[fd00::1]:3").hosts == (Host(str(ipaddress.ip_address("fd00::1")), 5),)
