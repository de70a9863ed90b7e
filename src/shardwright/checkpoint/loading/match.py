"""Matches the entries of a checkpoint to the tensors to load, by name and renames; reports all mismatches at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.checkpoint.format.manifest import Entry, TensorEntry
from shardwright.checkpoint.format.pieces import State, TensorShard
from shardwright.errors import CheckpointError, UsageError

Path = tuple[str, ...]
Rename = Mapping[str, str] | Callable[[str], str]

_SHOWN = 10  # of each kind of misfit
_SEARCHED = 300  # names among which near ones are looked for


@dataclass(frozen=True)
class Match:
    """The pairs (name that is wanted, entry), and the names of what does not fit.

    ``missing`` is wanted and not in the checkpoint, ``extra`` the reverse, ``differing`` has another shape or is a
    tensor on one side alone, ``converted`` has another dtype.
    """

    pairs: tuple[tuple[Path, Entry], ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    differing: tuple[str, ...]
    converted: tuple[str, ...]


def renamer(rename: Rename | None, names: Iterable[str]) -> Callable[[str], str]:
    """A function from the name of a parameter in the checkpoint to its name here.

    A mapping has patterns: the first that a name fits says what it becomes. Each ``*`` stands for any text, which the
    ``*`` of the new name take over in order.

    >>> renamer({"encoder.*": "backbone.*"}, ["encoder.0.weight"])("encoder.0.weight")
    'backbone.0.weight'

    Raises:
        UsageError: for a pattern that fits none of ``names``, or a new name with more stars than its pattern.
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    known = list(names)
    rules = []
    for pattern, new in rename.items():
        if new.count("*") > pattern.count("*"):
            raise UsageError(f"rename={{{pattern!r}: {new!r}}}: the new name has more * than the pattern")
        expression = re.compile("(.*)".join(re.escape(part) for part in pattern.split("*")))
        if not any(expression.fullmatch(name) for name in known):
            near = difflib.get_close_matches(pattern.replace("*", ""), known[:_SEARCHED], n=3, cutoff=0.3)
            raise UsageError(
                f"rename={{{pattern!r}: {new!r}}}: no entry of the checkpoint has a name that fits {pattern!r}; "
                f"near are: {', '.join(near) or 'none'}"
            )
        rules.append((expression, new))

    def apply(name: str) -> str:
        for expression, new in rules:
            if found := expression.fullmatch(name):
                parts = new.split("*")
                return "".join(text for pair in zip(parts, [*found.groups(), ""], strict=False) for text in pair)
        return name

    return apply


def parameter_at(path: Path) -> int | None:
    """Return the part of a path that is the name of a parameter; None for entries that belong to none."""
    if path[:2] == ("optimizer", "state"):
        return 2
    return 1 if path[0] in ("model", "ema") and len(path) > 1 else None


def renamer_of(paths: Iterable[Path], rename: Rename | None) -> Callable[[str], str]:
    """Return the `renamer` of the parameters to which entries at these paths belong."""
    at = {path: parameter_at(path) for path in paths}
    return renamer(rename, dict.fromkeys(path[i] for path, i in at.items() if i is not None))


def renamed_path(path: Path, apply: Callable[[str], str]) -> Path:
    """Return a path with the name of its parameter as ``apply`` gives it; others stay as they are."""
    at = parameter_at(path)
    return path if at is None else (*path[:at], apply(path[at]), *path[at + 1 :])


def match(
    entries: Mapping[Path, Entry], wanted: State, *, where: str, strict: bool = True, rename: Rename | None = None
) -> Match:
    """Find an entry for everything that is wanted, and something that wants every entry.

    An entry counts as extra where something of its section (the first part of its path) is wanted. A tied tensor,
    wanted under several names, is not missing where the checkpoint has it under one of them.

    Raises:
        CheckpointError: with ``strict``, one that names all that does not fit.
        UsageError: for patterns of ``rename`` that fit nothing or make two names one.
    """
    available = _renamed(entries, rename)
    pairs, missing, differing, converted = [], [], [], []
    there = {id(target) for path, target in wanted.items() if path in available and isinstance(target, Tensor)}
    for path, target in wanted.items():
        entry = available.get(path)
        name = ".".join(path)
        if entry is None:
            missing += [] if id(target) in there else [name]
        elif told := _other_shape(target, entry):
            differing.append(f"{name} {told}")
        else:
            pairs.append((path, entry))
            if (
                isinstance(target, Tensor | TensorShard)
                and isinstance(entry, TensorEntry)
                and target.dtype != entry.dtype
            ):
                converted.append(f"{name} is {entry.dtype_name} in the checkpoint, {_dtype(target.dtype)} here")
    sections = {path[0] for path in wanted}
    extra = [".".join(path) for path in available if path[0] in sections and path not in wanted]
    found = Match(tuple(pairs), tuple(missing), tuple(extra), tuple(differing), tuple(converted))
    if strict and (missing or extra or differing or converted):
        raise CheckpointError(_differences(found, available, wanted, where))
    return found


def _renamed(entries: Mapping[Path, Entry], rename: Rename | None) -> Mapping[Path, Entry]:
    if rename is None:
        return entries
    apply = renamer_of(entries, rename)
    found: dict[Path, Entry] = {}
    for path, entry in entries.items():
        new = renamed_path(path, apply)
        if new in found:
            raise UsageError(f"rename= makes one name of {found[new].name} and {entry.name}: {'.'.join(new)}")
        found[new] = entry
    return found


def _other_shape(target: object, entry: Entry) -> str | None:
    if not isinstance(target, Tensor | TensorShard):
        return None
    if not isinstance(entry, TensorEntry):
        return "is no tensor in the checkpoint, but one here"
    if tuple(target.shape) == entry.shape:
        return None
    return f"is {list(entry.shape)} in the checkpoint, {list(target.shape)} here"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _differences(found: Match, available: Mapping[Path, Entry], wanted: State, where: str) -> str:
    lines = [f"{where} does not fit what it is to be loaded into:"]
    for names, what in (
        (found.missing, "wanted here, missing in the checkpoint"),
        (found.extra, "in the checkpoint, not known here"),
        (found.differing, "of another shape or kind"),
        (found.converted, "of another dtype"),
    ):
        if names:
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"  {len(names)} {what}: {', '.join(names[:_SHOWN])}{more}")
    if sections := sorted({path[0] for path in wanted} - {path[0] for path in available}):
        lines.append(f"  the checkpoint has nothing at all under: {', '.join(sections)}")
    if pattern := _suggested(found, available, wanted):
        lines.append(f"Other names for the same? rename={pattern}")
    lines.append("strict=False loads what fits, converts dtypes, leaves the rest as it is and returns their names.")
    return "\n".join(lines)


def _suggested(found: Match, available: Mapping[Path, Entry], wanted: State) -> dict[str, str] | None:
    """The renames that give most missing names an extra entry of their shape."""
    missing = [path for path in wanted if ".".join(path) in set(found.missing[:_SEARCHED]) and parameter_at(path)]
    known = set(found.extra)
    extra = {path: e for path, e in available.items() if ".".join(path) in known and isinstance(e, TensorEntry)}
    best: dict[str, str] = {}
    left = [path for path in missing if isinstance(wanted[path], Tensor | TensorShard)]
    while left and len(best) < 3:
        pattern = _one_pattern(left[0], wanted, extra)
        if pattern is None:
            left.pop(0)
            continue
        best |= pattern
        [new] = pattern.values()
        fits = re.compile("(.*)".join(map(re.escape, new.split("*"))))
        left = [path for path in left if not fits.fullmatch(path[parameter_at(path) or 0])]
    return best or None


def _one_pattern(path: Path, wanted: State, extra: Mapping[Path, TensorEntry]) -> dict[str, str] | None:
    at = parameter_at(path) or 0
    candidates = {
        other[at]: other
        for other, entry in extra.items()
        if len(other) == len(path) and other[0] == path[0] and entry.shape == tuple(wanted[path].shape)
    }
    near = difflib.get_close_matches(path[at], list(candidates)[:_SEARCHED], n=1, cutoff=0.0)
    if not near:
        return None
    ours, theirs = path[at].split("."), near[0].split(".")
    same = 0
    while same < min(len(ours), len(theirs)) and ours[-1 - same] == theirs[-1 - same]:
        same += 1
    if same == 0:
        return {near[0]: path[at]}
    head = [".".join(parts[: len(parts) - same]) for parts in (theirs, ours)]
    return {_star(head[0]): _star(head[1])}


def _star(head: str) -> str:
    return f"{head}.*" if head else "*"
