"""Show and verify plans."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from shardwright.cli.group import RowOf, file_names
from shardwright.errors import UsageError

_MODES = RowOf("shardwright.compiler.plan.searches", "MODES")
_SEARCHES = RowOf("shardwright.compiler.plan.searches", "SEARCHES")


class _PlanCommand(click.Command):
    """A command that takes ``--compare other.json`` as ``--beside other.json``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        for at, (word, after) in enumerate(zip(args, [*args[1:], "--"], strict=False)):
            names_a_file = not after.startswith("-") and ":" not in after
            if word.startswith("--compare=") or (word == "--compare" and names_a_file):
                words[at] = word.replace("--compare", "--beside")
        return super().parse_args(ctx, words)


@click.command(cls=_PlanCommand)
@click.option(
    "--devices", metavar="N",
    help="How many; without it those of the mesh or of the loaded plan. min: the fewest on which a plan fits --memory.",
)  # fmt: skip
@click.option(
    "--hosts", type=int, metavar="N", help="On how many they stand; without it all on one, or as a profile says."
)
@click.option(
    "--mesh", metavar="dp=2,tp=4",
    help="The devices as named axes; pp=2 in front: two pipeline stages; pp=auto: as many as are quickest.",
)  # fmt: skip
@click.option(
    "--microbatches", type=int, metavar="N", help="How many go through the stages; without it a few for each stage."
)
@click.option(
    "--schedule", metavar="1f1b",
    help="The order in which they do: 1f1b, gpipe, zb-h1, interleaved (interleaved:4: four stages a group of ranks).",
)  # fmt: skip
@click.option(
    "--batch", metavar="ROWS",
    help="Of the global batch, in place of those that build() returns. search: those that give the most samples/s "
    "within --memory.",
)  # fmt: skip
@click.option(
    "--what-if",
    is_flag=True,
    help="Plan also on one more host and with twice the memory; takes as long again for each.",
)
@click.option("--mode", type=_MODES, default="auto", help="How much the planner decides.")
@click.option("--search", type=_SEARCHES, help="How it searches; without it the usual way of the mode.")
@click.option("--inputs", type=click.Choice(["split", "whole"]), default="split", help="Of batches.")
@click.option(
    "--hardware", default="cpu", metavar="NAME|FILE.json",
    help="Prices whose: cpu, v100, a100, h100, h200, or a profile that `shardwright bench --save-profile` wrote.",
)  # fmt: skip
@click.option(
    "--precision", type=click.Choice(["float32", "bf16", "fp16"]),
    help="What a step computes in, by autocast; without it as the loss function says.",
)  # fmt: skip
@click.option("--memory", metavar="80GiB", help="How much each device may hold, or auto.")
@click.option(
    "--recompute", multiple=True, metavar="PATTERN", help="Modules with activation checkpointing: 'blocks.*'."
)
@click.option("--optimizer", default="adamw", help="Whose states devices hold: a name of torch.optim.")
@click.option("--save", metavar="plan.json", help="Write the plan, for sw.parallelize(plan=...).")
@click.option("--load", metavar="plan.json", help="Check that this plan fits, and show it, in place of planning.")
@click.option("--full", is_flag=True, help="Every operator and collective in place of one page.")
@click.option("--explain", metavar="NAME", help="What it does with this module, operator or parameter, and why.")
@click.option(
    "--compare", is_flag=True,
    help="Add the data parallel, tensor parallel and fully sharded plans; followed by a file, the same as --beside.",
)  # fmt: skip
@click.option(
    "--html", metavar="plan.html", help="Write a page for a browser: the model as a tree, a step's time line."
)
@click.option("--beside", metavar="other.json", help="What another plan of this model does otherwise, also in --html.")
@click.option("--profile", is_flag=True, help="Say below where the seconds of planning went.")
@click.option("--json", "as_json", is_flag=True, help="The page as one JSON object; docs/planning.md lists its keys.")
@click.argument("target", metavar="FILE.py:build", shell_complete=file_names)
def plan(
    target: str,
    save: str | None,
    full: bool,
    explain: str | None,
    compare: bool,
    html: str | None,
    beside: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show who would compute what, without any of the devices.

    build is a function without arguments that returns (model, loss_fn, batch), batch being one global batch, and pins
    as a fourth where wanted. It is called on torch's meta device, so that large models take no memory.
    """
    if full + as_json + (explain is not None) > 1 or (compare and (full or explain is not None)):
        raise UsageError(
            "--full, --explain and --json each print something else, and --compare adds to a page or to JSON"
        )
    if beside is not None and html is None and (as_json or explain is not None):
        raise UsageError("--beside adds to a page: leave out --json and --explain, or add --html plan.html")
    from shardwright.launch.progress_notes import waiting_for

    with waiting_for(f"reading {target}") as work:
        from shardwright.compiler.report.plans.html import save_html
        from shardwright.compiler.report.plans.stages_page import stages_page
        from shardwright.runtime.verification.plan_file import plan_file

        planned = plan_file(target, progress=work.stage, **options)
        if save is not None:
            planned.plan.save(save)
        work.stage("pricing")
        if html is not None:
            save_html(planned.page(target, compared=compare, beside=beside), html)
        if as_json:
            text = json.dumps(planned.document(compared=compare), indent=1)
        elif explain is not None:
            text = planned.explained(explain)
        else:
            text = planned.full() if full else planned.with_comparison() if compare else str(planned)
        if beside is not None and not as_json and explain is None:
            text = f"{text}\n\n{planned.difference(beside)}"
        if planned.stages is not None and not as_json:
            text = f"{text}\n\n{stages_page(planned.stages)}"
    click.echo(text)


@click.command()
@click.option("-n", "--ranks", metavar="N", help="How many ranks; without it one per visible GPU, or one.")
@click.option("--mode", type=_MODES, default="auto", help="How much the planner decides.")
@click.option("--mesh", metavar="dp=2,tp=4", help="The ranks as named axes.")
@click.option("--search", type=_SEARCHES, help="How the planner searches; without it the usual way of the mode.")
@click.option("--plan", metavar="plan.json", help="Verify this plan, as `shardwright plan --save` wrote it.")
@click.option("--steps", default=3, help="How many AdamW steps to compare.")
@click.option("--loop", metavar="train", help="In place of AdamW, a generator of FILE.py: train(parallel, batches).")
@click.option("--lr", default=1e-3, help="Their learning rate.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(["float64", "float32"]), help="Without it, both.")
@click.option("--seed", default=0, help="Set before build() is called.")
@click.argument("target", metavar="FILE.py:build")
def verify(target: str, ranks: str | None, dtypes: tuple[str, ...], **options: Any) -> None:
    """Compare a plan with one device, on real processes: losses, gradients, buffers and updated parameters.

    build is a function without arguments that returns (model, loss_fn, batch), or a list of global batches, and pins
    as a fourth where wanted. The exit code is 0 within the tolerances, 1 beyond them, and 2 where nothing was compared.
    """
    from shardwright.runtime.verification.from_file import verify_file

    sys.exit(verify_file(target, ranks, options | {"dtypes": dtypes or None}))
