"""From a YAML file and ``key=value`` overrides to a checked `Config`, every problem in a readable line of its own."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardwright.errors import UsageError
from shardwright.zoo.options import Config
from shardwright.zoo.ranges import Range
from shardwright.zoo.rows import Table
from shardwright.zoo.tables import LOSSES, MODELS

SHIPPED = Path(__file__).parent / "configs"


def shipped_names() -> list[str]:
    """The configurations that come with Shardwright."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_config(name: str) -> Path:
    """The file ``name``, or the shipped configuration of that name, with or without ``.yaml``.

    Raises:
        UsageError: where there is neither.
    """
    for path in (Path(name), SHIPPED / Path(name).with_suffix(".yaml").name):
        if path.is_file():
            return path
    near = difflib.get_close_matches(Path(name).stem, shipped_names(), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"no file {name} and no configuration of that name, which are {', '.join(shipped_names())}{hint}")


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration ``name`` (see `find_config`) with ``overrides`` such as ``train.epochs=3``.

    Raises:
        UsageError: with a line for every unknown key, wrong type and value out of its range.
    """
    path = find_config(name)
    for override in overrides:
        if "=" not in override.partition(" ")[0]:
            raise UsageError(f"-o {override} sets nothing; type -o key=value, for example -o train.epochs=3")
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise UsageError(f"{path}: expected sections with keys, got {type(loaded).__name__}")
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)))
        raw = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from error
    problems: list[str] = []
    config = _read(Config, _with_loss(raw), "", problems)
    if problems:
        raise UsageError("\n".join([f"{path}:", *(f"  {problem}" for problem in problems)]))
    result: Config = config
    return result


def to_yaml(config: Config) -> str:
    """The whole configuration, defaults included, as a file that `load_config` reads."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))  # tuples become lists


def _with_loss(raw: Any) -> Any:
    """The sections, with the loss that their model is trained with where they have none."""
    if LOSSES.section in raw:
        return raw
    model = raw.get(MODELS.section)
    row = MODELS.rows.get(str(model.get(MODELS.key))) if isinstance(model, dict) else None
    # Any loss will do for a model that is refused.
    return raw | {LOSSES.section: {LOSSES.key: row.loss if row else next(iter(LOSSES.rows))}}


# Checking

_Problems = list[str]


def _read(kind: Any, raw: Any, path: str, problems: _Problems, range: Range | None = None) -> Any:
    """``raw`` as ``kind`` (a type hint); appends to ``problems`` what is wrong, and then returns anything."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _read_union(get_args(kind), raw, path, problems, range)
    if origin is Literal:
        return _read_choice(get_args(kind), raw, path, problems)
    if origin is tuple:
        if not isinstance(raw, list):
            return problems.append(f"{path}: expected a list, got {_shown(raw)}")
        return tuple(_read(get_args(kind)[0], item, f"{path}[{i}]", problems, range) for i, item in enumerate(raw))
    if origin is dict:
        if not isinstance(raw, dict):
            return problems.append(f"{path}: expected keys with values, got {_shown(raw)}")
        return raw
    if is_dataclass(kind):
        return _read_section(kind, raw, path, problems)
    return _read_plain(kind, raw, path, problems, range)


def _read_union(kinds: tuple[Any, ...], raw: Any, path: str, problems: _Problems, range: Range | None) -> Any:
    """``raw`` as the one type beside None; sections that come in several kinds have a table instead."""
    [kind] = [kind for kind in kinds if kind is not type(None)]
    return None if raw is None else _read(kind, raw, path, problems, range)


def _read_chosen(table: Table[Any], raw: Any, path: str, problems: _Problems) -> Any:
    choices, key = tuple(table.rows), table.key
    if not isinstance(raw, dict) or key not in raw:
        return problems.append(f"{path}.{key} is missing; choose one of {', '.join(choices)}")
    if raw[key] not in choices:
        return _read_choice(choices, raw[key], f"{path}.{key}", problems)
    return _read_section(table.rows[raw[key]].options, raw, path, problems)


def _read_choice(choices: tuple[Any, ...], raw: Any, path: str, problems: _Problems) -> Any:
    if raw in choices:
        return raw
    return problems.append(f"{path}: {_shown(raw)} is unknown; choose one of {', '.join(choices)}{_near(raw, choices)}")


def _read_section(kind: Any, raw: Any, path: str, problems: _Problems) -> Any:
    if not isinstance(raw, Mapping):
        return problems.append(f"{path}: expected keys with values, got {_shown(raw)}")
    hints, known = get_type_hints(kind), {f.name: f for f in fields(kind)}
    prefix = f"{path}." if path else ""
    before = len(problems)
    for key in raw:
        if key not in known:
            hint = _near(key, known, prefix) or f"; known: {', '.join(known)}"
            problems.append(f"{prefix}{key} is unknown{hint}")
    values = {}
    for name, declared in known.items():
        if name in raw:
            values[name] = _read_key(declared, hints[name], raw[name], f"{prefix}{name}", problems)
        elif declared.default is MISSING and declared.default_factory is MISSING:
            problems.append(f"the section {prefix}{name} is missing")
    return kind(**values) if len(problems) == before else None


def _read_key(declared: Field[Any], hint: Any, raw: Any, path: str, problems: _Problems) -> Any:
    table = declared.metadata.get("table")
    if table is not None:
        return _read_chosen(table, raw, path, problems)
    return _read(hint, raw, path, problems, declared.metadata.get("range"))


_PLAIN: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
}


def _read_plain(kind: type, raw: Any, path: str, problems: _Problems, range: Range | None) -> Any:
    expected, accepted = _PLAIN[kind]
    if not isinstance(raw, accepted) or (isinstance(raw, bool) and kind is not bool):
        return problems.append(f"{path}: expected {expected}, got {_shown(raw)}")
    if range is not None and isinstance(raw, (int, float)) and not range.holds(raw):
        return problems.append(f"{path}: expected {expected} of {range.text}, got {_shown(raw)}")
    return kind(raw)


def _near(key: Any, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(str(key), list(known), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _shown(raw: Any) -> str:
    return "nothing" if raw is None else repr(raw)
