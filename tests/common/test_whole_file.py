"""A file is there whole, or as it was before."""

import os
from pathlib import Path

import pytest

from shardwright.common.whole_file import write_whole


def test_an_interrupted_write_leaves_no_file_and_the_old_one_whole(tmp_path):
    path = tmp_path / "state.pt"
    path.write_text("old")

    def interrupted(temporary: Path) -> None:
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, interrupted)
    assert os.listdir(tmp_path) == ["state.pt"]
    assert path.read_text() == "old"


def test_a_file_takes_its_name_once_it_is_complete(tmp_path):
    path = tmp_path / "state.pt"
    path.write_text("old")

    def slowly(draft: Path) -> None:
        assert draft.parent == tmp_path
        draft.write_text("new")
        assert path.read_text() == "old"

    write_whole(path, slowly)
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["state.pt"]


def test_a_write_that_makes_no_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "state.pt", lambda _: None)
    assert os.listdir(tmp_path) == []
