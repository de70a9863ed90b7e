"""The characters that a recogniser knows, and their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardwright.errors import DataError, UsageError

LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Dictionary:
    """Characters by their ids from 0 on; the blank of CTC comes behind them."""

    characters: str

    @classmethod
    def of(cls, path: str | None, use_space_char: bool = False) -> Dictionary:
        """The dictionary of a file with a character on each line, or 0-9a-z without one.

        Raises:
            DataError, UsageError: where the file is missing, or a line is not one character.
        """
        characters = LETTERS if path is None else _read(path)
        return cls(characters + " " * (use_space_char and " " not in characters))

    @property
    def classes(self) -> int:
        return len(self.characters) + 1

    @cached_property
    def id_of(self) -> Mapping[str, int]:
        return {character: at for at, character in enumerate(self.characters)}

    @cached_property
    def lowers(self) -> bool:
        """Return whether it knows no upper case, so that texts are lowered."""
        return self.characters == self.characters.lower()

    def known(self, text: str, lower: bool | None = None) -> str:
        """Return the text as it is compared, without what the dictionary does not know.

        It is in lower case where ``lower`` says so; None means where the dictionary has no other.

        >>> Dictionary.of(None).known("It's 5")
        'its5'
        """
        text = text.lower() if (self.lowers if lower is None else lower) else text
        return "".join(character for character in text if character in self.id_of)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of CTC's best path: repetitions are one, blanks are none.

        >>> Dictionary.of(None).decode([10, 10, 36, 10, 11])
        'aab'
        """
        blank = len(self.characters)
        kept = [now for before, now in zip([blank, *ids], ids, strict=False) if now not in (before, blank)]
        return "".join(self.characters[at] for at in kept)


def _read(path: str) -> str:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UsageError(f"character_dict_path: there is no file {path}; null takes 0-9a-z") from error
    wrong = next((number for number, line in enumerate(lines, 1) if len(line) != 1), None)
    if wrong is not None:
        raise DataError(f"{path}, line {wrong}: expected one character, got {lines[wrong - 1]!r}")
    if len(set(lines)) < len(lines):
        twice = next(line for at, line in enumerate(lines) if line in lines[:at])
        raise DataError(f"{path}: the character {twice!r} stands there twice; keep one of them")
    return "".join(lines)
