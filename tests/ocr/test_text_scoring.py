"""Boxes from maps, and what is counted as right, beside examples worked by hand and shapely's areas."""

import math

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ocr.libraries import geometry
from shardwright.ocr.options.parts import DetectionPostprocess
from shardwright.ocr.samples.dictionary import Dictionary
from shardwright.ocr.samples.sample import TextBox, corners
from shardwright.ocr.scoring.boxes import detect
from shardwright.ocr.scoring.counts import DetectionCounts, RecognitionCounts, count_detections, count_word

HOW = DetectionPostprocess(name="DBPostprocess")


def box(left, top, right, bottom):
    return corners([[left, top], [right, top], [right, bottom], [left, bottom]])


def text(points, word="x"):
    return TextBox(points, word)


A, B = box(0, 0, 10, 10), box(20, 0, 30, 10)
COUNTS = {
    "all found": ([A, B], [text(A), text(B)], (2, 2, 2)),
    "nothing there": ([], [], (0, 0, 0)),
    "nothing found": ([], [text(A)], (1, 0, 0)),
    "half of it is not more than half": ([box(0, 0, 10, 5)], [text(A)], (1, 1, 0)),
    "a little more than half": ([box(0, 0, 10, 5.1)], [text(A)], (1, 1, 1)),
    "a second hit is wrong": ([A, A], [text(A)], (1, 2, 1)),
    "one hit matches one text": ([A], [text(A), text(A)], (2, 1, 1)),
    "unreadable texts are not demanded": ([], [text(A, "###"), text(B, "*")], (0, 0, 0)),
    "a hit inside an unreadable text drops": ([box(1, 1, 4, 4), B], [text(A, "###"), text(B)], (1, 1, 1)),
    "half inside an unreadable text stays": ([box(5, 0, 15, 10)], [text(A, "###")], (0, 1, 0)),
    "an odd hit": ([corners([[0, 0], [1, 1]]), corners([[0, 0], [4, 4], [4, 0], [0, 4]])], [text(A)], (1, 2, 0)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_detections_are_matched_by_the_rule_of_icdar(name):
    detections, texts, (given, detected, matched) = COUNTS[name]
    assert count_detections(detections, texts) == DetectionCounts(1, given, detected, matched)


def test_counts_are_added_before_they_are_divided():
    both = DetectionCounts(1, 4, 2, 2) + DetectionCounts(1, 0, 2, 0)
    assert both.metrics() == {"precision": 0.5, "recall": 0.5, "hmean": 0.5}
    assert DetectionCounts().metrics() == {"precision": 0.0, "recall": 0.0, "hmean": 0.0}
    words = RecognitionCounts(1, 1, 0.0) + RecognitionCounts(3, 0, 1.5)
    assert words.metrics() == {"acc": 0.25, "norm_edit_distance": 0.625}


@pytest.mark.parametrize(
    ("said", "label", "right", "distance"),
    [
        ("cat", "C.A-T", 1, 0.0),
        ("cat", "cart", 0, 0.25),
        ("", "cart", 0, 1.0),
        ("", "!", 1, 0.0),
        ("a b", "ab", 1, 0.0),
    ],
)
def test_words_are_compared_by_what_the_dictionary_knows(said, label, right, distance):
    assert count_word(said, label, Dictionary.of(None)) == RecognitionCounts(1, right, distance)


def test_boxes_of_a_map_are_those_of_the_image_as_it_was():
    """Two texts of a map that is half as high and a quarter as wide; a faint one and a speck are none."""
    probability = np.zeros((64, 96), np.float32)
    probability[10:20, 8:40] = 0.9
    probability[40:50, 50:90] = 0.7
    probability[30:36, 10:40] = 0.5  # below box_thresh
    probability[60:62, 2:4] = 1.0  # smaller than min_size
    found = sorted(detect(probability, (128, 384, 0.5, 0.25), HOW), key=lambda one: one.points[0][1])
    assert [round(one.score, 1) for one in found] == [0.9, 0.7]
    for one, (left, top, right, bottom) in zip(found, ((8, 10, 39, 19), (50, 40, 89, 49)), strict=True):
        high, wide = bottom - top, right - left
        grown = 1.5 * high * wide / (2 * (high + wide))
        expected = box(left - grown, top - grown, right + grown, bottom + grown) / (0.25, 0.5)
        assert np.allclose(one.points, expected.clip(0, (384, 128)), atol=0.1)


number = st.floats(-300, 300, allow_nan=False)
polygons = st.lists(st.tuples(number, number), max_size=7).map(corners)


@given(st.lists(polygons, max_size=4), st.lists(st.tuples(polygons, st.sampled_from(["x", "###"])), max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_detections_and_texts_can_be_counted(detections, texts):
    counts = count_detections(detections, [TextBox(*one) for one in texts])
    assert counts.matched <= min(counts.texts, counts.detected) <= 4
    assert counts.texts == sum(word == "x" for _, word in texts)


@given(st.floats(1, 80), st.floats(1, 80), st.floats(0, 3))
@settings(max_examples=40, deadline=None)
def test_rectangles_shrink_as_the_paper_says(width, height, angle):
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    points = box(0, 0, width, height) @ turn.T
    distance = geometry.shrink_distance(points, 0.4)
    assert distance == pytest.approx(width * height * 0.84 / (2 * (width + height)), rel=1e-6)
    shrunk = sum(map(geometry.area, geometry.offset(points, -distance)))
    assert shrunk == pytest.approx(
        max(0, width - 2 * distance) * max(0, height - 2 * distance), abs=0.05 * (width + height)
    )
    assert shapely.Polygon(points).area == pytest.approx(geometry.area(points))


def test_polygons_follow_a_text_that_is_bent():
    """An arc: its polygon covers it and no more, the rectangle around it much else."""
    y, x = np.mgrid[0:120, 0:120]
    radius = np.hypot(x - 60, y - 100)
    arc = ((radius > 60) & (radius < 74) & (y < 80)).astype(np.float32)
    how = DetectionPostprocess(name="DBPostprocess", box_type="poly", expand_ratio=0.01)
    [found] = detect(arc, (120, 120, 1.0, 1.0), how)
    assert 8 < len(found.points) < 40
    assert found.score > 0.9
    assert geometry.area(found.points) == pytest.approx(arc.sum(), rel=0.1)
    quads = detect(arc, (120, 120, 1.0, 1.0), DetectionPostprocess(name="DBPostprocess", box_thresh=0.2))
    assert geometry.area(quads[0].points) > 2 * arc.sum()
    [scaled] = detect(arc, (60, 240, 2.0, 0.5), how)
    assert np.allclose(scaled.points, found.points / (0.5, 2.0))
    assert count_detections([found.points], [text(found.points)]) == DetectionCounts(1, 1, 1, 1)


def test_words_are_compared_in_the_case_that_is_asked_for():
    both = Dictionary("abAB")
    counted = [
        count_word("aB", label, both, lower=lower).right for label in ("aB", "AB") for lower in (None, False, True)
    ]
    assert counted == [1, 1, 1, 0, 0, 1]
    assert count_word("ab", "AB", Dictionary("ab"), lower=False).right == 0
