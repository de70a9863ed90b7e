"""What mkdocs asks while it builds the pages: the README is the first one, and links lead to pages or are none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from shardwright.cli import cli

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_WIDTH = 82
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Put the README among the pages, and one that is made here."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    files.append(File.generated(config, "launching/commands.md", content=command_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page, with links to what is no page turned into words."""
    where = Path("README.md") if page.file.src_uri == "index.md" else Path("docs") / page.file.src_uri
    return site_links(markdown, where)


def site_links(markdown: str, where: Path) -> str:
    """The text of the page ``where``, a path in the repository, for a site that has the README and docs/ alone.

    >>> site_links("[a](docs/gpu.md#c), [make](Makefile)", Path("README.md"))
    '[a](gpu.md#c), make'
    >>> site_links("[home](../README.md)", Path("docs/gpu.md"))
    '[home](index.md)'
    """
    parts = _CODE.split(markdown)
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda link: _led(link, where), part) for part in parts
    )


def _led(link: re.Match[str], where: Path) -> str:
    picture, text, target = link.groups()
    file, mark, anchor = target.partition("#")
    if "://" in target or not file:
        return link[0]
    reached = Path(os.path.normpath(where.parent / file))
    if (ROOT / reached).is_dir():
        reached = reached / "README.md"
    page = Path("index.md") if reached == Path("README.md") else None
    if page is None and reached.parts[0] == "docs" and (ROOT / reached).exists():
        page = reached.relative_to("docs")
    if page is None:
        return text
    begin = Path() if where == Path("README.md") else where.relative_to("docs").parent
    return f"{picture}[{text}]({os.path.relpath(page, begin)}{mark}{anchor})"


def command_page() -> str:
    """What every command says with --help, as a page."""
    lines = ["# Every command", "", "What each says with `--help`.", ""]
    for name, text in commands("shardwright", cli, None):
        lines += [f"## {name}", "", "```text", text, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def commands(name: str, command: click.Command, above: click.Context | None) -> Iterator[tuple[str, str]]:
    """A command and those below it, by their names, each with its help."""
    context = click.Context(
        command, info_name=name.split()[-1], parent=above, terminal_width=_WIDTH, help_option_names=["-h", "--help"]
    )
    yield name, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for inner in sorted(command.list_commands(context)):
            found = command.get_command(context, inner)
            assert found is not None
            yield from commands(f"{name} {inner}", found, context)
