"""What hypothesis draws is the same in every run, whatever the process has done before."""

import importlib

from hypothesis import given
from hypothesis import strategies as st


def drawn():
    found = []

    @given(st.lists(st.integers(0, 10**6), max_size=5))
    def draw(numbers):
        found.append(numbers)

    draw()
    return found


def test_examples_do_not_depend_on_what_is_imported(tmp_path, monkeypatch):
    before = drawn()
    (tmp_path / "numbers_of_a_module.py").write_text(f"NUMBERS = {[*range(123_000, 124_000)]}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("numbers_of_a_module")
    assert drawn() == before
