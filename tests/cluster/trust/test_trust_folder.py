"""What trust does to a ~/.ssh and undoes, and what it gives on of what a host says."""

import pytest

from shardwright.cluster.trust.on_host import Folder
from shardwright.cluster.trust.plan import SshState, authorized_line, plan
from shardwright.errors import LaunchError
from shardwright.launch.hosts.hosts import Hosts

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPstRQYgVBLuTVZlvTFDvQVoD8gcZLpQnp8pIwGcLmKs"
OTHER = KEY.replace("LmKs", "LmKt")


def content(home):
    """Every path below a home, with its bytes and its mode."""
    paths = sorted(home.rglob("*"))
    return {p.relative_to(home).as_posix(): (p.is_file() and p.read_bytes(), p.stat().st_mode) for p in paths}


def used(home):
    """A ~/.ssh as people have it: without a last line's end, with a mode of its own and a byte that is no text."""
    (ssh := home / ".ssh").mkdir(mode=0o750)
    (ssh / "authorized_keys").write_bytes(b"# mine\xff\nssh-rsa AAAA me")
    (ssh / "authorized_keys").chmod(0o640)
    (ssh / "config").write_text("Host *\n")
    return ssh


@pytest.mark.parametrize("begin", [used, lambda home: None], ids=["used", "bare"])
def test_run_twice_changes_nothing_and_undo_restores_byte_for_byte(tmp_path, begin):
    begin(tmp_path)
    before, folder = content(tmp_path), Folder(tmp_path)
    made = folder.make_key()
    assert made["made"]
    assert folder.add([f"{KEY} b"], [f"b {OTHER}"]) == {"authorized_keys": 1, "known_hosts": 1}
    after = content(tmp_path)
    assert folder.make_key() == {"key": made["key"], "made": False}
    assert folder.add([f"{KEY} b"], [f"b {OTHER}"]) == {"authorized_keys": 0, "known_hosts": 0}
    assert content(tmp_path) == after
    assert oct(after[".ssh/id_ed25519"][1])[-3:] == "600"
    folder.add([f"{OTHER} c"], [])  # a host more, later
    assert set(folder.undo()["restored"]) == {"id_ed25519", "id_ed25519.pub", "authorized_keys", "known_hosts"}
    assert content(tmp_path) == before
    assert folder.undo() == {"restored": [], "cleaned": [], "left": []}


def test_what_others_have_added_since_stays(tmp_path):
    ssh, folder = used(tmp_path), Folder(tmp_path)
    folder.add([f"{KEY} b"], [f"b {OTHER}"])
    with open(ssh / "authorized_keys", "ab") as file:
        file.write(b"ssh-rsa AAAB colleague\n")
    told = folder.undo()
    assert (told["cleaned"], told["restored"]) == (["authorized_keys"], ["known_hosts"])
    assert (ssh / "authorized_keys").read_bytes() == b"# mine\xff\nssh-rsa AAAA me\nssh-rsa AAAB colleague\n"


def test_a_key_that_is_there_is_never_overwritten(tmp_path):
    ssh = used(tmp_path)
    (ssh / "id_ed25519").write_text("secret")
    with pytest.raises(OSError, match=r"id_ed25519 has no id_ed25519.pub beside it; type `ssh-keygen -y"):
        Folder(tmp_path).make_key()
    (ssh / "id_rsa").write_text("another")
    (ssh / "id_rsa.pub").write_text(f"{KEY} me\n")
    assert Folder(tmp_path).make_key() == {"key": f"{KEY} me", "made": False}
    assert (ssh / "id_ed25519").read_text() == "secret"


def test_a_link_stays_a_link(tmp_path):
    (ssh := tmp_path / ".ssh").mkdir()
    (tmp_path / "shared").write_text("# shared\n")
    (ssh / "authorized_keys").symlink_to(tmp_path / "shared")
    Folder(tmp_path).add([f"{KEY} b"], [])
    assert (ssh / "authorized_keys").is_symlink()
    assert (tmp_path / "shared").read_text() == f"# shared\n{KEY} b\n"


def look(host, key, authorized=(), known=()):
    return SshState.of(host, {"user": "me", "key": key, "authorized": authorized, "known": known, "undo": []})


def test_what_is_shown_is_what_each_lacks():
    hosts = Hosts.from_list("a,bob@b")
    a, b = hosts.hosts
    known = {"a": (f"a {KEY}",), "b": (f"b {KEY}",)}
    bare = plan(hosts.hosts, {"a": look(a, None), "b": look(b, f"{OTHER} x")}, known)
    assert [line for one in bare for line in one.lines()] == [
        "a (me):", "  make a key without a passphrase: ~/.ssh/id_ed25519", "  let in b: ~/.ssh/authorized_keys",
        "  know b: ~/.ssh/known_hosts", "b (me):", "  let in a: ~/.ssh/authorized_keys", "  know a: ~/.ssh/known_hosts",
    ]  # fmt: skip
    done = {
        "a": look(a, KEY, [authorized_line(b, OTHER)], known["b"]),
        "b": look(b, OTHER, [f"{KEY} another comment"], known["a"]),
    }
    assert [line for one in plan(hosts.hosts, done, known) for line in one.lines()] == [
        "a (me): nothing to do",
        "b (me): nothing to do",
    ]


@pytest.mark.parametrize(
    "key", [f'command="reboot" {KEY}', f"{KEY}\n{OTHER}", f"{KEY} \x1b[2J", "ssh-ed25519 short", "", 7, ["x"]]
)
def test_nothing_but_a_key_is_given_to_other_hosts(key):
    host = Hosts.from_list("evil").hosts[0]
    with pytest.raises(LaunchError, match="the public key of evil is none: ") as refused:
        look(host, key)
    assert str(refused.value).isprintable()
    assert authorized_line(host, look(host, f"{KEY} from=*").key) == f"{KEY} evil"
