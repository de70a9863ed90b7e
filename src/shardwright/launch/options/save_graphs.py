"""The folder where the ranks dump their graphs, which a script or the command line of `launch` says.

The command line reaches a script in one way only, its environment; `parallelize` looks there when its own argument
does not say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath

from shardwright.errors import UsageError

VARIABLE = "SHARDWRIGHT_SAVE_GRAPHS"
LEVELS = (1, 2)


@dataclass(frozen=True)
class SaveGraphs:
    """Level 1 dumps the graph with every operator's strategy, level 2 the program of each rank as well."""

    directory: str
    level: int = 2

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(
                f"save_graphs has level {self.level}; 1 dumps the strategies, 2 the program of each rank as well"
            )
        if not self.directory:
            raise UsageError("save_graphs names no folder; type --save-graphs DIR, or DIR:1 for the strategies alone")

    @staticmethod
    def parse(text: str) -> SaveGraphs:
        """Read ``DIR`` or ``DIR:level``.

        >>> SaveGraphs.parse("graphs"), SaveGraphs.parse("graphs:1").level
        (SaveGraphs(directory='graphs', level=2), 1)
        """
        directory, level = re.fullmatch(r"(.*?)(?::(\d+))?", text, re.DOTALL).groups()  # type: ignore[union-attr]
        return SaveGraphs(directory, int(level) if level else 2)

    @staticmethod
    def wanted(
        argument: str | PathLike[str] | tuple[str | PathLike[str], int] | None, environment: Mapping[str, str]
    ) -> SaveGraphs | None:
        """Return the ``argument`` of a script, a folder or (folder, level), or else the command line's."""
        if isinstance(argument, tuple):
            directory, level = argument
            return SaveGraphs(fspath(directory), level)
        if argument is not None:
            return SaveGraphs(fspath(argument))
        return SaveGraphs.parse(environment[VARIABLE]) if environment.get(VARIABLE) else None

    def __str__(self) -> str:
        return f"{self.directory}:{self.level}"
