"""The characters of a text, as ids to predict one after the other.

The text that comes with the package, ``texts/shardwright.txt``, is its licence, pages of its documentation and
docstrings of its modules, put one after the other at one point of its history and kept as it is, so that losses on it
stay comparable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardwright.data.remote import local_copy
from shardwright.errors import DataError, UsageError

OWN_TEXT = Path(__file__).parent / "texts" / "shardwright.txt"
TRAIN_SHARE = 0.9
_PARTS = {True: "training part", False: "test part", None: "text"}


class CharacterText(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text: pairs of ``sequence_length`` ids and the ids that follow each of them, int64 both.

    The first nine tenths of the text are trained on, the last tenth is tested on; ``train=None`` takes all. Each part
    is cut into pieces that begin ``sequence_length`` characters apart; what is left at its end is not used.

    Args:
        path: a text in UTF-8 or its URL (see `local_copy`); by default the one that comes with Shardwright.

    Attributes:
        vocabulary: the characters of the whole text, sorted; a character's id is its place among them.

    Raises:
        DataError: where the text cannot be read or is too short for one piece.
        UsageError: for a sequence length below 1.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, sequence_length: int = 64, train: bool | None = True
    ) -> None:
        if sequence_length < 1:
            raise UsageError(f"expected a sequence_length of at least 1, got {sequence_length}")
        file = OWN_TEXT if path is None else local_copy(path)
        text = _read(file)
        self.sequence_length = sequence_length
        self.vocabulary = "".join(sorted(set(text)))
        self._ids = {character: number for number, character in enumerate(self.vocabulary)}
        border = int(TRAIN_SHARE * len(text))
        self._text = self.encode(text if train is None else text[:border] if train else text[border:])
        if len(self) < 1:
            raise DataError(
                f"{file}: the {_PARTS[train]} has {len(self._text)} characters; expected more "
                f"than sequence_length={sequence_length}, since a piece needs one that follows it"
            )

    def encode(self, text: str) -> Tensor:
        """The ids of ``text``, int64 of shape (characters,); raises `DataError` for a character that has none."""
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise DataError(f"the text that was read has no {', '.join(map(repr, unknown))}, so they have no id")
        return torch.tensor([self._ids[character] for character in text], dtype=torch.int64, device="cpu")

    def decode(self, ids: Tensor) -> str:
        """The text of ids of shape (characters,)."""
        return "".join(self.vocabulary[number] for number in ids.tolist())

    def __len__(self) -> int:
        return (len(self._text) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids, targets = self.gather([range(len(self))[index]])
        return ids[0], targets[0]

    def gather(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The collated batch of one or more ``indices``: ids and targets of shape (n, sequence_length)."""
        starts = torch.as_tensor(indices, dtype=torch.int64, device="cpu") * self.sequence_length
        places = starts[:, None] + torch.arange(self.sequence_length, device="cpu")
        return self._text[places], self._text[places + 1]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: at offset {error.start}: expected text in UTF-8, got: {error.reason}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
