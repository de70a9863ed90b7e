"""How large the page of a plan is, and how long a browser takes to show it: ResNet-50 and transformers.

    python benchmarks/plan_page.py [--layers 48 400] [--rounds 5]

Chromium without a screen, by Playwright, on this machine. *Loaded* is from the opening of the file to the end of the
page's script, the median of the rounds; *unfolded* is how long it takes to show every row.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"
UNFOLDED = "{ const start = performance.now(); document.getElementById('unfold').click(); performance.now() - start }"


def networks(layers: list[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Name, model, loss function and batch of each."""
    import torch
    from torch.nn import functional as F

    from shardwright.training.zoo import GPT, resnet50

    def pixels_loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    def words_loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    with torch.device("meta"):
        images = torch.zeros(64, 3, 224, 224), torch.zeros(64, dtype=torch.long)
        words = torch.zeros(64, 128, dtype=torch.long), torch.zeros(64, 128, dtype=torch.long)
        yield "ResNet-50", resnet50(1000, "imagenet"), pixels_loss, images
        for count in layers:
            gpt = GPT(8192, width=512, heads=8, layers=count, sequence_length=128, dropout=0.0)
            yield f"transformer of {count} layers", gpt, words_loss, words


def main() -> None:
    from playwright.sync_api import sync_playwright

    from shardwright.compiler.capture.step import captured_step
    from shardwright.compiler.mesh.mesh import Mesh
    from shardwright.compiler.plan.make import make_plan
    from shardwright.compiler.plan.pricing.hardware import read_hardware
    from shardwright.compiler.plan.request import PlanRequest
    from shardwright.compiler.report.plans.html import document_of, save_html

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[48, 400])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    hardware = read_hardware("h100")
    print("| network | operators | page, MB | loaded, s | unfolded, s |\n| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, model, loss_fn, batch in networks(options.layers):
            capture = captured_step(model, loss_fn, batch, {})
            plan = make_plan(capture, PlanRequest(Mesh.of(dp=2, tp=4), "auto", hardware=hardware))
            path = Path(folder, "plan.html")
            save_html(document_of(name, {"this plan": plan}, hardware), path)
            took = []
            for _ in range(options.rounds):
                page = browser.new_context(offline=True).new_page()
                page.goto(path.as_uri())
                took.append((page.evaluate(LOADED) / 1e3, page.evaluate(f"eval({UNFOLDED!r})") / 1e3))
                page.close()
            loaded_s, unfolded_s = (statistics.median(column) for column in zip(*took, strict=True))
            size = path.stat().st_size / 1e6
            print(f"| {name} | {len(capture.nodes)} | {size:.2f} | {loaded_s:.2f} | {unfolded_s:.2f} |", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
