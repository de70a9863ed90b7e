"""The command by which a host tries to log in to another one, with nothing to ask of a person."""

from __future__ import annotations


def login_try(target: str, connect_s: int) -> tuple[str, ...]:
    """Ends with 0 where ssh reaches ``target``, connected within ``connect_s`` seconds, without a password."""
    options = ("BatchMode=yes", f"ConnectTimeout={connect_s}", "ConnectionAttempts=1")
    return ("ssh", "-T", "-x", *(word for option in options for word in ("-o", option)), "--", target, "true")
