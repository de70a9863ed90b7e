"""The store of a job tells nothing to those who do not know its secret, and takes nothing from them."""

import json
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, TCPStore

from shardwright.distributed.meeting import SealedStore, job_store, open_part
from shardwright.errors import UsageError, WorldError
from shardwright.launch.hosts.environment import SECRET_VARIABLE, read_environment
from shardwright.launch.hosts.seal import Seal
from shardwright.launch.options.variables import RANK_VARIABLES, read_variables

# Of three letters or fewer some stand in any bytes of an encryption by chance.
WORDS = [
    word
    for word in ("card", "first", "verdict", "group", "shardwright", "127.0.0.1", os.uname().nodename, "gloo")
    if len(word) > 3
]


@settings(max_examples=40)
@given(name=st.text(max_size=20), value=st.binary(max_size=300), other=st.text(max_size=20), flip=st.integers(0))
def test_what_is_sealed_is_opened_by_its_secret_under_its_name_alone(name, value, other, flip):
    sealed = Seal("a").sealed(name, value)
    assert Seal("a").opened(name, sealed) == value
    assert Seal("a").sealed(name, value) == sealed
    assert Seal("b").opened(name, sealed) is None
    assert (Seal("a").opened(other, sealed) is None) == (other != name)
    damaged = bytearray(sealed)
    damaged[flip % len(sealed)] ^= 1
    assert Seal("a").opened(name, bytes(damaged)) is None
    assert Seal("a").opened(name, sealed[: flip % len(sealed)]) is None
    assert len(value) < 8 or value not in sealed


@pytest.fixture
def served():
    return TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def stranger(store):
    return TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)


def test_it_does_what_torchs_store_does(served):
    sealed, plain = job_store(served, "job", "secret"), job_store(HashStore(), "job", "")
    for store in (sealed, plain):
        store.set("a", "one")
        assert store.get("a") == b"one"
        assert store.compare_set("b", "", "two") == b"two"
        assert store.compare_set("b", "", "three") == b"two"
        assert store.compare_set("b", "two", "three") == b"three"
        assert store.get("b") == b"three"
        assert (store.add("c", 2), store.add("c", 3), store.add("c", 0)) == (2, 5, 5)
        assert (store.check(["a", "b"]), store.check(["a", "z"])) == (True, False)
        store.wait(["a", "b"], timedelta(seconds=5))
        assert (store.delete_key("a"), store.check(["a"])) == (True, False)
        store.set_timeout(timedelta(milliseconds=50))
        with pytest.raises(dist.DistError, match=r"[Tt]imeout"):
            store.get("never")


def test_a_stranger_reads_noise_and_is_not_believed(served):
    store = job_store(served, "job", "secret")
    store.set("group/address", "127.0.0.1:1234")
    store.set("empty", "")
    other = stranger(served)
    keys = other.list_keys()
    assert len(keys) == 2
    told = b" ".join([other.get(key) for key in keys] + [key.encode() for key in keys])
    assert not [word for word in (*WORDS, "job", "secret", "address", "1234") if word.encode() in told]
    for key in keys:
        other.set(key, json.dumps({"rank": 0}))
    for name in ("group/address", "empty"):
        with pytest.raises(WorldError, match=f"the store of the job has of .*{name} was not written by one of"):
            store.get(name)
    with pytest.raises(WorldError, match="was not written by one of its ranks"):
        store.compare_set("empty", "", "x")
    for unlike in (job_store(served, "job", ""), job_store(served, "job", "another")):
        assert not unlike.check(["group/address"])


def test_values_of_one_key_are_not_those_of_another(served):
    store = SealedStore(served, "secret")
    store.set("a", "one")
    store.set("b", "two")
    name = store._sealing.name
    stranger(served).set(name("a"), served.get(name("b")))
    with pytest.raises(WorldError):
        store.get("a")


def test_what_is_not_sealed_does_not_tell_the_secret(served):
    open_part(served, "job", "secret").set("a", "one")
    [key] = stranger(served).list_keys()
    assert "secret" not in key
    assert "job" not in key.removeprefix("shardwright/")


def test_gloo_works_by_a_sealed_store(served):
    """Its C++ calls the methods of the store, which nobody else holds."""
    dist.init_process_group(
        "gloo", store=PrefixStore("group", job_store(served, "job", "secret")), rank=0, world_size=1
    )
    try:
        dist.all_reduce(torch.ones(1))
        dist.new_group([0])
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_a_job_of_the_launcher_has_a_secret_of_its_own_and_ends_with_collectives_under_way(launching):
    """Somebody holds the group, and the worker threads of gloo still have tensors to drop when the script ends."""
    script = launching.write(
        "train.py",
        """
        import os, sys, torch, torch.distributed as dist, shardwright as sw
        world = sw.init("gloo")
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.tolist() == [2, 2]
        dist.new_group([0, 1])
        dist.barrier()
        if world.rank == 1:
            port = int(os.environ["MASTER_PORT"])
            other = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            keys = other.list_keys()
            open("keys", "w").write(chr(10).join(keys))
            open("values", "wb").write(b" ".join(other.get(key) for key in keys))
        dist.barrier()
        open(f"secret.{world.rank}", "w").write(os.environ["SHARDWRIGHT_SECRET"])
        held = dist.group.WORLD
        under_way = [dist.all_reduce(torch.ones(1_000_000), async_op=True) for _ in range(40)]
        del under_way
        """,
    )
    for arguments in (("-n", "2", script), ("-n", "1", "--", "sh", "-c", "echo -n $SHARDWRIGHT_SECRET > secret.other")):
        ended = launching.run(*arguments)
        assert (ended.code, ended.stderr) == (0, "")
    assert launching.log(1, "stderr") == ""
    keys = (launching.folder / "keys").read_text().splitlines()
    assert len(keys) > 4
    assert {len(key) for key in keys} == {64}
    values = (launching.folder / "values").read_bytes()
    assert not [word for word in WORDS if word.encode() in values]
    secrets = [(launching.folder / f"secret.{rank}").read_text() for rank in ("0", "1", "other")]
    assert secrets[0] == secrets[1] != secrets[2]
    told = [path.read_bytes() for path in launching.folder.rglob("*") if path.is_file() and "log_output" in path.parts]
    assert not [secret for secret in secrets for text in told if secret.encode() in text]


def test_the_secret_comes_from_the_launcher_alone():
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert read_environment(place).secret == ""
    told = read_environment(place | {SECRET_VARIABLE: "x"})
    assert told.secret == "x"
    assert "'x'" not in repr(told)
    assert SECRET_VARIABLE in RANK_VARIABLES
    with pytest.raises(UsageError, match="the launcher sets SHARDWRIGHT_SECRET for each rank itself"):
        read_variables([f"{SECRET_VARIABLE}=x"], {})
