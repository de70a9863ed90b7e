"""Write docs/pictures/pipeline_page.png: the page of a plan with pipeline stages, as Chromium shows it.

`apt-get install chromium`, then `.venv/bin/python scripts/pipeline_page.py`; it takes two minutes.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

from shardwright.compiler.capture.step import captured_step
from shardwright.compiler.capture.tracing.gpu_autocast import autocast_without_gpu
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.make import make_plan
from shardwright.compiler.plan.pricing.hardware import read_hardware
from shardwright.compiler.plan.request import PlanRequest
from shardwright.compiler.report.plans.html import document_of, save_html
from shardwright.distributed.precision import within
from shardwright.training.zoo import GPT

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "pipeline_page.png"
HARDWARE = read_hardware("a100").on_hosts([str(device) for device in range(8)])  # one device each
SHOWN = {"width": 1180, "height": 1090}


def save_page(path: Path) -> None:
    """Plan a GPT with 2.5 billion parameters on eight hosts, and save the page."""
    with torch.device("meta"), autocast_without_gpu():
        model = GPT(32768, width=4096, heads=32, layers=12, sequence_length=1024, dropout=0.0)
        batch = torch.zeros(16, 1024, dtype=torch.long), torch.zeros(16, 1024, dtype=torch.long)
        loss_fn = within("bf16", torch.device("cuda"), _loss)
        captured = captured_step(model, loss_fn, batch, {})
    plan = make_plan(captured, PlanRequest(Mesh.of(ranks=8), hardware=HARDWARE, search_stages=True))
    save_html(document_of("gpt.py:build", {"this plan": plan}, HARDWARE, ""), path)


def _loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, labels = batch
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        page = Path(folder) / "plan.html"
        save_page(page)
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = browser.new_context(viewport=SHOWN, color_scheme="light").new_page()
        shown.goto(page.as_uri())
        shown.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
