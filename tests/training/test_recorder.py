"""The numbers of a run, in files and in trackers."""

import csv
import json
import math
import re

import pytest
from test_callbacks import trainer_of, with_accuracy

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import TrainingError, UsageError
from shardwright.training.records import RECORDS, Csv, JsonLines, Record, RecordTarget, record_problems


def recorded(folder, to, epochs=2):
    trainer, data = trainer_of([sw.Recorder(folder, to, every=2)], loss_fn=with_accuracy)
    trainer.fit(data, epochs=epochs, validate=data)
    return [float(trainer.evaluation.loss), trainer.evaluation.metrics["accuracy"]]


def test_files_hold_what_the_run_measured(tmp_path):
    (last, accuracy), _ = run_ranks(2, recorded, tmp_path, ["csv", "jsonl"])
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [(row["step"], row["epoch"]) for row in rows] == [(2, 1), (3, 1), (5, 2), (6, 2)]
    assert rows[0].keys() == {"step", "epoch", "loss", "step_seconds", "learning_rate"}
    assert rows[0]["learning_rate"] == 0.1
    assert rows[0]["step_seconds"] > 0
    assert (rows[-1]["validation_loss"], rows[-1]["validation_accuracy"]) == (last, accuracy)
    with (tmp_path / "records.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    same = [{name: float(value) for name, value in row.items() if value} for row in table]
    assert same == [{name: float(value) for name, value in row.items()} for row in rows]


@pytest.mark.parametrize("make", [Csv, JsonLines])
def test_what_came_after_the_checkpoint_is_left_out_and_half_a_line_too(tmp_path, make):
    first = make(RecordTarget(tmp_path, 0, {}))
    for steps in (1, 2, 3):
        first.write(Record(steps, 1, {"loss": float(steps)}))
    first.close()
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + '{"step": 4, "lo')
    again = make(RecordTarget(tmp_path, 2, {}))
    again.write(Record(3, 1, {"loss": 30.0, "validation_loss": math.pi}))
    again.close()
    assert [path] == list(tmp_path.iterdir())
    text = path.read_text()
    assert "3.0" not in text.replace("30.0", "")
    assert text.count("\n") == (4 if make is Csv else 3)
    assert str(math.pi) in text.splitlines()[-1]


def test_what_there_is_not_is_refused_with_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setattr("shardwright.training.records.find_spec", lambda name: None)
    problems = record_problems(["csv", "tensorbord", "wandb"])
    assert problems == [
        "'tensorbord' is unknown; choose of csv, jsonl, tensorboard, wandb, mlflow",
        "wandb is not installed; type `pip install wandb`",
    ]
    with pytest.raises(UsageError, match=r"expected Recorder\(to=...\) of what there is: mlflow is not installed"):
        sw.Recorder(tmp_path, ["mlflow"])


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_shows_what_the_files_hold_also_after_a_resumption(tmp_path):
    pytest.importorskip("tensorboard")
    writer = RECORDS["tensorboard"].make(RecordTarget(tmp_path, 0, {}))
    for steps in (1, 2, 3):
        writer.write(Record(steps, 1, {"loss": float(steps)}))
    writer.close()
    writer = RECORDS["tensorboard"].make(RecordTarget(tmp_path, 2, {}))
    writer.write(Record(3, 2, {"loss": 0.5}))
    writer.close()
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 0.5)]


def test_mlflow_and_wandb_take_records(tmp_path, monkeypatch):
    """Those of both that are installed, without a server."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tried = [name for name in ("mlflow", "wandb") if not record_problems([name])]
    if not tried:
        pytest.skip("neither mlflow nor wandb is installed")
    for name in tried:
        writer = RECORDS[name].make(RecordTarget(tmp_path, 0, {"epochs": 3}))
        writer.write(Record(1, 1, {"loss": 2.0}))
        writer.close()
    if "mlflow" in tried:
        (metric,) = (tmp_path / "mlruns").rglob("metrics/loss")
        assert metric.read_text().split()[1:] == ["2.0", "1"]
    if "wandb" in tried:
        assert list((tmp_path / "wandb").rglob("*.wandb"))


@pytest.mark.parametrize(
    ("file", "line", "why"),
    [
        ("records.jsonl", '{"step": "x"}', "step is 'x', expected a whole number"),
        ("records.jsonl", "{", "it is no JSON: "),
        ("records.jsonl", "3", "it is 3, expected an object"),
        ("records.csv", "x,1", "step is 'x', expected a whole number"),
    ],
)
def test_damaged_records_of_an_earlier_start_are_named_with_the_line(tmp_path, file, line, why):
    first = '{"step": 1}' if file.endswith("jsonl") else "step,epoch"
    (tmp_path / file).write_text(f"{first}\n{line}\n")
    kind = JsonLines if file.endswith("jsonl") else Csv
    with pytest.raises(TrainingError, match=re.escape(f"{tmp_path / file} is damaged in line 2: {why}")):
        kind(RecordTarget(tmp_path, 5, {}))
    assert (tmp_path / file).read_text() == f"{first}\n{line}\n"
