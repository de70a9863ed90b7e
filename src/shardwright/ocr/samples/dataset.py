"""Labelled images as `sw.loader` reads them: each sample of fixed shapes, and failing ones counted, named, replaced."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.data.order import permutation
from shardwright.errors import DataError
from shardwright.ocr.samples.labels import SynthText, read_detection_list, read_icdar, read_word_list
from shardwright.ocr.samples.sample import Array, NeedsLabel, PipelineStep, Sample, SampleSource, Task, generator
from shardwright.ocr.samples.words import WordDatabase

IMAGES = (".jpg", ".jpeg", ".png", ".bmp")


class Sources:
    """Samples by their number: a share of those that there are, less those whose labels do not fit.

    ``texts`` gives the labels of samples with rising numbers faster than ``source`` does one by one; None stands for a
    label that cannot be read.
    """

    def __init__(
        self,
        size: int,
        source: Callable[[int], SampleSource],
        share: float,
        where: str,
        texts: Callable[[Array], Iterable[str | None]] | None = None,
    ) -> None:
        self._source, self._texts, self._where = source, texts, where
        if not size:
            raise DataError(f"{where} has no samples")
        kept = max(1, round(size * share))
        self._kept = None if kept == size else np.sort(permutation(size, seed=0)[:kept])
        self.size = kept

    def __getitem__(self, number: int) -> SampleSource:
        return self._source(number if self._kept is None else int(self._kept[number]))

    def fitting(self, step: NeedsLabel) -> tuple[Sources, Counter[str]]:
        """The samples whose labels fit a step, and how many others there are, by what is wrong with them.

        Raises:
            DataError: where no label fits.
        """
        numbers = np.arange(self.size) if self._kept is None else self._kept
        texts = self._texts(numbers) if self._texts else (self._source(number).text for number in numbers.tolist())
        wrong: Counter[str] = Counter()
        fits = np.ones(self.size, dtype=bool)
        for at, text in enumerate(texts):
            why = None if text is None else step.misfit(text)
            if why is not None:
                wrong[why] += 1
                fits[at] = False
        if not fits.any():
            raise DataError(
                f"{self._where}: not one of {self.size} labels fits: {in_words(wrong)}; correct the labels, the "
                "dictionary or max_text_len"
            )
        found = copy.copy(self)
        found._kept, found.size = numbers[fits] if wrong else self._kept, int(fits.sum())
        return found, wrong


def in_words(wrong: Mapping[str, int]) -> str:
    """The number of labels of each kind.

    >>> in_words({"without a known character": 1, "longer than max_text_len, 4": 2})
    '2 longer than max_text_len, 4; 1 without a known character'
    """
    return "; ".join(f"{count} {why}" for why, count in sorted(wrong.items()))


def file_sources(listed: Sequence[SampleSource], share: float, where: str) -> Sources:
    """Return the listed sources, of which a ``share`` is used."""
    return Sources(len(listed), listed.__getitem__, share, where)


def detection_images(images: Path, labels: Path, share: float) -> Sources:
    """The images of a folder, labelled by one file of lines with JSON or by a folder of ICDAR's files.

    Raises:
        DataError: where a file is missing or a line is broken.
    """
    if not labels.is_dir():
        listed = [SampleSource(name, _reader(images / name), boxes) for name, boxes in read_detection_list(labels)]
        return file_sources(listed, share, str(labels))
    files = sorted(path for path in images.glob("*") if path.suffix.lower() in IMAGES)
    listed = [SampleSource(path.name, _reader(path), read_icdar(labels / f"gt_{path.stem}.txt")) for path in files]
    return file_sources(listed, share, f"the folder {images}")


def synthetic_images(images: Path, labels: Path, share: float) -> Sources:
    """Return the images of SynthText, labelled by its ``gt.mat`` or by what MindOCR's converter makes of that.

    Raises:
        DataError: where the file is missing or broken.
    """
    found = SynthText(labels)

    def source(number: int) -> SampleSource:
        name, boxes = found.image(number)
        return SampleSource(name, _reader(images / name), boxes)

    return Sources(found.size, source, share, str(labels))


def word_images(images: Path, labels: Path, share: float) -> Sources:
    """The images of a folder and their words, listed in a file.

    Raises:
        DataError: where the file is missing or a line is broken.
    """
    listed = [SampleSource(name, _reader(images / name), text=text) for name, text in read_word_list(labels)]
    return file_sources(listed, share, str(labels))


def word_database(folder: Path, share: float) -> Sources:
    """The words of a database of LMDB, or of all those below a folder, one after the other.

    Raises:
        DataError: where there is none, or one of them is empty.
    """
    folders = [folder] if (folder / "data.mdb").is_file() else sorted(path.parent for path in folder.rglob("data.mdb"))
    databases = [WordDatabase(each) for each in folders or [folder]]
    ends = np.cumsum([database.size for database in databases])

    def source(number: int) -> SampleSource:
        at = int(np.searchsorted(ends, number, side="right"))
        return databases[at].source(number - int(ends[at] - databases[at].size) + 1)

    def texts(numbers: Array) -> Iterator[str | None]:
        for database, end in zip(databases, ends.tolist(), strict=True):
            within = numbers - (end - database.size)
            yield from database.texts((within[(within >= 0) & (within < database.size)] + 1).tolist())

    return Sources(int(ends[-1]), source, share, str(folder), texts)


def _reader(path: Path) -> Callable[[], bytes]:
    def read() -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise DataError(
                f"there is no image {path}, which the labels name; correct data_dir, or take it out of the labels"
            ) from error

    return read


@dataclass(frozen=True)
class Limit:
    """The number of samples that may fail on one rank before it gives up."""

    failures: int


class TextImages(torch.utils.data.Dataset[Any]):
    """Samples from one source after the other, prepared by ``steps``; a sample is a tuple of tensors, ``columns``.

    A sample that fails is named on stderr, and the next one that does not takes its place; this happens to at most
    ``limit.failures`` samples on a rank, then a `DataError` ends the run. ``failed`` counts them, those of loading
    processes too. Samples whose labels do not fit a step are none of these: they are left out from the start, the same
    ones on every rank, and ``left_out`` counts them by what is wrong with them.
    """

    def __init__(
        self,
        sources: Sequence[Sources],
        steps: Sequence[PipelineStep],
        columns: Sequence[str],
        limit: Limit,
        task: Task,
    ) -> None:
        self._sources, self._steps, self.columns, self._limit = list(sources), list(steps), tuple(columns), limit
        self.task = task
        self.left_out: Counter[str] = Counter()
        for step in steps:
            if isinstance(step, NeedsLabel):
                self._leave_out(step)
        self._ends = np.cumsum([each.size for each in self._sources])
        self._failed = torch.zeros(len(self), dtype=torch.uint8, device="cpu")
        self._failed.share_memory_()  # type: ignore[no-untyped-call]

    def _leave_out(self, step: NeedsLabel) -> None:
        fitting = [source.fitting(step) for source in self._sources]
        self._sources = [source for source, _ in fitting]
        for _, wrong in fitting:
            self.left_out += wrong

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def failed(self) -> int:
        return int(self._failed.sum())

    def source(self, index: int) -> SampleSource:
        """Return where sample ``index`` comes from, and its label."""
        at = int(np.searchsorted(self._ends, index, side="right"))
        return self._sources[at][index - int(self._ends[at] - self._sources[at].size)]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One sample; what is random in it is as in the first epoch of seed 0."""
        return tuple(column[0] for column in self.gather([index]))

    def gather(self, indices: Sequence[int], seed: int = 0, epoch: int = 0) -> tuple[Tensor, ...]:
        """The collated batch of one or more ``indices``."""
        samples = [self._sample(int(index), seed, epoch) for index in indices]
        return tuple(torch.from_numpy(np.stack(column)) for column in zip(*samples, strict=True))

    def _sample(self, index: int, seed: int, epoch: int) -> list[Any]:
        for skipped in range(len(self)):
            at = (index + skipped) % len(self)
            try:
                return self._columns(self.prepared(at, generator(seed, epoch, index)), at)
            except Exception as error:  # of any library that reads or turns images
                self._note(at, error)
        raise DataError("not one of the samples can be read")

    def prepared(self, index: int, random: np.random.Generator) -> Sample:
        source = self.source(index)
        sample = Sample(source.name, np.frombuffer(source.read(), np.uint8), list(source.boxes), source.text)
        for step in self._steps:
            step(sample, random)
        return sample

    def _columns(self, sample: Sample, index: int) -> list[Any]:
        made = {
            "image": sample.image.astype(np.float32, copy=False),
            "index": np.asarray(index, np.int64),
            "shape": np.asarray([*sample.shape, *sample.ratio], np.float64),
        }
        return [(made | sample.columns)[name] for name in self.columns]

    def _note(self, index: int, error: Exception) -> None:
        known = bool(self._failed[index])
        self._failed[index] = 1
        what = f"{type(error).__name__}: " * (not isinstance(error, DataError)) + str(error)
        name = _name(self, index)
        if self.failed > self._limit.failures:
            allowed = self._limit.failures
            raise DataError(
                f"sample {index} ({name}) failed: {what}"
                + (f"; {self.failed} samples have failed, max_failed_samples allows {allowed}" if allowed else "")
            ) from error
        if not known:
            print(
                f"sample {index} ({name}) failed and the next one takes its place, {self.failed} of at most "
                f"{self._limit.failures}: {what}",
                file=sys.stderr,
                flush=True,
            )


def _name(images: TextImages, index: int) -> str:
    try:
        return images.source(index).name
    except Exception:  # the label itself cannot be read
        return f"number {index}"
