"""The commands of every page run, print what the page shows, or say why they do not run."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import page_commands as pages
import pytest
import typer.main
from page_commands import PAGES, ROOT, Command

from autoplan.cli import app

IN_DEFAULT = ("platform.md", "types_and_rules.md")  # the others are left to make test-all
RUN = [page for page in PAGES if any(not command.reason for command in pages.commands(page))]
NOT_RUN = [(page, command) for page in PAGES for command in pages.commands(page) if command.reason]
GROUP = typer.main.get_command(app)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[] if p.name in IN_DEFAULT else pytest.mark.slow, id=str(p.relative_to(ROOT))) for p in RUN],
)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    for command, printed in pages.outputs(page, tmp_path):
        if command.shown is not None:
            assert pages.bare(printed) == command.shown, "python tests/house/page_commands.py --write"


@pytest.mark.parametrize(
    ("page", "command"),
    [pytest.param(p, c, id=f"{p.stem}: {c.line[:40]} ({c.reason})") for p, c in NOT_RUN],
)
def test_what_is_not_run_is_there(page: Path, command: Command) -> None:
    """The file, module, target or subcommand with its flags exists."""
    program, first, *rest = shlex.split(command.line)
    if program == "autoplan":
        flags_exist(command.line)
    elif program == "make":
        assert re.search(rf"^{re.escape(first)}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), command.line
    elif program == "python" and first == "-m":
        assert importlib.util.find_spec(rest[0]) is not None, command.line
    elif program == "python":
        assert (ROOT / first).exists(), command.line
    else:
        assert program in ("pip", "torchrun", ".venv/bin/torchrun"), command.line


def flags_exist(line: str) -> None:
    """The subcommand of a line is one of the command line's, and so are its long flags."""
    _, *words = shlex.split(line)
    found = GROUP
    while hasattr(found, "commands") and words:
        assert words[0] in found.commands, line
        found = found.commands[words.pop(0)]
    known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known, line


INLINE = re.compile(r"`(autoplan [a-z][^`]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_exist(page: Path) -> None:
    """Their words stand for others (PLAN, NAME), so they are read and not run."""
    for line in INLINE.findall(page.read_text()):
        flags_exist(line.replace("\\|", "|").split(" | ")[0].replace("\n", " "))


def test_pages_have_commands() -> None:
    assert len(RUN) >= 9 and sum(len(pages.commands(page)) for page in RUN) >= 60


def test_a_command_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("    autoplan estimate nothing-7b --cluster 4xh100\n")
    with pytest.raises(pages.PageError, match="nothing-7b"):
        list(pages.outputs(page, tmp_path))
    page.write_text("```sh not run: no time\nmake test\n```\n")
    with pytest.raises(ValueError, match="no time"):
        pages.commands(page)


def test_output_is_written_into_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "    autoplan stacks | head -1\n\n```text\nold\n```\n\n```python\nprint(6 * 7)\n```\n\n```text\n```\nend\n"
    page.write_text(text)
    found = list(pages.outputs(page, tmp_path))
    pages.write(page, found)
    wanted = text.replace("old", found[0][1].rstrip()).replace("text\n```\nend", "text\n42\n```\nend")
    assert len(found) == 2 and page.read_text() == wanted


@pytest.mark.slow
def test_the_python_of_the_tutorial_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorials" / "embed.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "predicted: step" in done.stdout and '"zero_optimization"' in done.stdout
