"""The characters of a text, each predicted from those before it."""

import pytest
import torch

from shardwright.data.text import OWN_TEXT, CharacterText
from shardwright.errors import DataError, UsageError


@pytest.fixture
def path(tmp_path):
    (tmp_path / "text").write_text("abcdefghij" * 10)
    return tmp_path / "text"


def test_pieces_follow_each_other_and_targets_are_the_next_characters(path):
    data = CharacterText(path, 8)
    assert data.vocabulary == "abcdefghij"
    assert len(data) == 11  # 90 characters
    for index in range(11):
        ids, targets = data[index]
        assert (ids.dtype, targets.dtype, ids.shape) == (torch.int64, torch.int64, (8,))
        assert ids.tolist() == [(8 * index + at) % 10 for at in range(8)]
        assert targets.tolist() == [(8 * index + at + 1) % 10 for at in range(8)]
    ids, targets = data.gather([3, 1])
    assert torch.equal(ids, torch.stack([data[3][0], data[1][0]]))
    assert torch.equal(targets, torch.stack([data[3][1], data[1][1]]))
    assert torch.equal(data[-1][0], data[10][0])
    with pytest.raises(IndexError):
        data[11]


def test_the_last_tenth_is_for_testing(tmp_path):
    (tmp_path / "text").write_text("x" * 90 + "0123456789")
    test = CharacterText(tmp_path / "text", 9, train=False)
    assert len(test) == 1
    assert [test.decode(part) for part in test[0]] == ["012345678", "123456789"]
    assert test.vocabulary == "0123456789x"
    whole = CharacterText(tmp_path / "text", 9, train=None)
    assert (len(whole), whole.decode(whole[10][0])) == (11, "012345678")
    assert CharacterText(tmp_path / "text", 9).gather(range(9))[1].unique().tolist() == [10]


def test_the_text_that_comes_with_the_package():
    train, test = CharacterText(), CharacterText(train=False)
    text = OWN_TEXT.read_text()
    assert len(text) > 40_000
    assert text.isascii()
    assert train.vocabulary == test.vocabulary == "".join(sorted(set(text)))
    assert train.decode(torch.cat([train[i][0] for i in range(len(train))])) == text[: len(train) * 64]
    assert len(test) > 100
    assert train.decode(train.encode("Licensed")) == "Licensed"


def test_what_does_not_fit(path, tmp_path):
    with pytest.raises(UsageError, match="expected a sequence_length of at least 1, got 0"):
        CharacterText(path, 0)
    with pytest.raises(DataError, match="text: the test part has 10 characters; expected more than sequence_length=10"):
        CharacterText(path, 10, train=False)
    with pytest.raises(DataError, match=r"nothing: cannot be read: \[Errno 2\]"):
        CharacterText(tmp_path / "nothing")
    (tmp_path / "odd").write_bytes(b"abc\xff")
    with pytest.raises(DataError, match="odd: at offset 3: expected text in UTF-8, got: invalid start byte"):
        CharacterText(tmp_path / "odd")
    with pytest.raises(DataError, match="the text that was read has no 'X', 'é'"):
        CharacterText(path, 8).encode("abcXé")
