"""From a YAML file and ``key=value`` overrides to a checked `Config`, every problem in a readable line of its own."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from shardwright.common.system_errors import in_words
from shardwright.errors import UsageError
from shardwright.training.zoo.options import Config
from shardwright.training.zoo.reading import read
from shardwright.training.zoo.tables import LOSSES, MODELS

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
    raw = sections(path, overrides)
    problems: list[str] = []
    config = read(Config, _with_loss(raw), "", problems)
    if problems:
        raise UsageError("\n".join([f"{path}:", *(f"  {problem}" for problem in problems)]))
    result: Config = config
    return result


def sections(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a YAML file holds, with ``overrides`` such as ``train.epochs=3``; ``steps[2].p=1`` is of a list.

    Raises:
        UsageError: where the file cannot be read, holds no sections, or an override sets nothing.
    """
    for override in overrides:
        if "=" not in override.partition(" ")[0]:
            raise UsageError(f"-o {override} sets nothing; type -o key=value, for example -o train.epochs=3")
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise UsageError(f"{path}: expected sections with keys, got {type(loaded).__name__}")
        loaded.merge_with_dotlist(list(overrides))
        raw: Any = OmegaConf.to_container(loaded, resolve=True)
    except OSError as error:
        if error.errno is None:  # what omegaconf makes of a number
            raise UsageError(f"{path}: expected sections with keys, got something else: {error}") from None
        raise UsageError(f"the configuration {in_words(error, path)}") from None
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from error
    return dict(raw)


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
