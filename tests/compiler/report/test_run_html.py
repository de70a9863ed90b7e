"""The page of a run for a browser: what it is told, and what it shows in one."""

import json
import time

import pytest
from browser import opened

from reported_jobs import PLAN, job, tell
from shardwright.compiler.report.runs.html import document_of, history, save_html, whole_run
from shardwright.errors import UsageError
from shardwright.launch.progress.ranks import WatchedJob


def document(made, ranks=4):
    now, histories = WatchedJob(made.path).snapshot(), [history(made, rank) for rank in range(ranks)]
    return document_of(made, whole_run(now, histories), histories)


@pytest.fixture
def run(tmp_path):
    """A run of 1,000 lines for each rank, one of which held the others up, which failed at the end."""
    made, live = job(tmp_path, status="failed", exit_code=3, lasted_s=151)
    live.write_steps(0, json.dumps({"plan": PLAN}).encode() + b"\n")
    for number in range(1000):
        for rank in range(4):
            wire = {"in": number, "out": 2 * number, "within": 0} if rank == 0 and number % 100 == 0 else None
            loss = float("nan") if number == 999 else 8 / (number + 1)
            own = {"communicating_s": 0.1 if rank == 2 else 2.5}
            tell(
                live,
                rank,
                -2000 + 2 * number,
                step=5 * (number + 1),
                loss=loss,
                **own,
                **({"wire": wire} if wire else {}),
            )
    validation = {"loss": 0.5, "metrics": {"accuracy": 0.875}, "samples": 9}
    live.write_steps(0, json.dumps({"time_s": time.time(), "step": 5000, "validation": validation}).encode() + b"\n")
    live.write_state(1, "stopped", signal="SIGSTOP", pid=101)
    live.write_state(1, "running")
    live.write_state(0, "ended", code=-2)
    live.write_state(3, "ended", code=3)
    made.write_failure({"rank": 3, "cause": "rank 3 failed: </script>", "time_s": time.time()})
    return made


def test_a_page_is_told_means_and_curves_of_bounded_length(run):
    told = document(run)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert (told["end"], told["plan"]) == ("failed (exit code 3)", PLAN)
    first = told["ranks"][0]
    assert (first["mean"]["steps"], first["mean"]["seconds"], first["mean"]["communicating"]) == (5000, 1.0, 0.5)
    assert len(first["curve"]) == 500
    assert [rank["mark"] for rank in told["ranks"]] == [
        "ended (SIGINT)",
        "",
        "slow: 2.0 × others",
        "ended (exit code 3)",
    ]
    assert first["wire"] == {"in": 900, "out": 1800, "within": 0}
    assert told["validations"] == [[5000, {"loss": 0.5, "accuracy": 0.875}]]
    texts = [event["text"] for event in told["events"]]
    assert texts == [
        "rank 1 stopped (SIGSTOP)",
        "rank 1 went on",
        "rank 0 ended by SIGINT",
        "rank 3 ended with code 3",
        "rank 3 failed: </script>",
    ]


def test_what_a_resumption_did_again_counts_once(tmp_path):
    made, live = job(tmp_path, ranks=1)
    for step in (5, 10, 15, 10, 15, 20):
        tell(live, 0, step=step)
    assert [line.step for line in history(made, 0).lines] == [5, 10, 15, 20]


def test_a_run_without_a_step_and_a_page_that_cannot_be_written(tmp_path):
    made, _ = job(tmp_path)
    told = document(made)
    assert [rank["mean"] for rank in told["ranks"]] == [None] * 4
    with pytest.raises(UsageError, match=r"cannot write the page .*/none/run.html: No such file"):
        save_html(told, tmp_path / "none" / "run.html")
    save_html(told | {"job": "n\udcffcht ü"}, tmp_path / "run.html")  # a folder's name that is no UTF-8
    assert "<title>Job n?cht ü</title>" in (tmp_path / "run.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_in_a_browser(run, tmp_path):
    save_html(document(run), tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size < 5_000_000
    with opened(tmp_path / "run.html", color_scheme="dark") as shown:
        assert shown.inner_text("h1") == "Job digits"
        assert shown.inner_text("#sentence").startswith("failed (exit code 3) after 0:02:31")
        assert "4 ranks on 2 hosts; step 5000" in shown.inner_text("#sentence")
        assert shown.locator("#loss path").count() == 1
        assert shown.locator("#loss circle").count() == 1
        assert shown.locator("#seconds path").count() == 5  # four ranks and the plan
        assert shown.locator("#steps .held-row").count() == 5
        assert "1.11 times what the plan expects on h100" in shown.inner_text("#steps-said")
        assert shown.locator("#held .held-row").count() == 5
        shown.hover("#loss svg", position={"x": 500, "y": 60})
        assert "loss " in shown.inner_text("#loss [role=status]")
        shown.click("#ranks th:has-text('computes') button")
        assert shown.get_attribute("#ranks th:has-text('computes')", "aria-sort") == "descending"
        assert shown.inner_text("#ranks tbody tr:first-child td:first-child") == "2"
        assert "rank 3 failed: </script>" in shown.inner_text("#events")
    empty, _ = job(tmp_path, ranks=1, name="empty")
    save_html(document(empty, 1), tmp_path / "empty.html")
    with opened(tmp_path / "empty.html") as shown:
        assert "told of no step" in shown.inner_text("#sentence")
