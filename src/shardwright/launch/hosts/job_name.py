"""Names of jobs: each is a folder's name and stands in scripts, lines of logs and tables, whoever gives it."""

from __future__ import annotations

from shardwright.errors import UsageError

MOST_BYTES = 255  # of the name of a folder


def check_job_name(name: str, source: str = "--job") -> None:
    """Raise `UsageError` where ``name`` cannot be a job's; ``source`` is the option or variable that gives it.

    A line end in it would be a line of its own in a printed script.
    """
    check_printable(name, source)
    if not name or "/" in name or name.startswith("."):
        raise UsageError(
            f"{source} {name!r} cannot name a folder; type a name without / that does not begin with a dot"
        )
    if (size := len(name.encode())) > MOST_BYTES:
        raise UsageError(f"{source} {name[:20]}...: the name has {size} bytes; type one of at most {MOST_BYTES}")


def check_printable(text: str, source: str) -> None:
    """Raise `UsageError` for line ends and other characters that a terminal or a script would not take for text."""
    if found := next((character for character in text if not character.isprintable()), None):
        raise UsageError(f"{source} {text!r} has the control character {found!r} in it; type letters and digits")
