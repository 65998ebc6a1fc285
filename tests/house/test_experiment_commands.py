"""The commands of experiments/**/README.md exist, their parsers take what stands there, and the index is complete."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from test_page_commands import flags_exist

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "experiments" / "README.md"
PAGES = sorted((ROOT / "experiments").rglob("README.md"))
INLINE = re.compile(r"`((?:autoplan|python -m) [^`]*)`")


def commands(text: str) -> list[str]:
    """The commands of a page, each on one line, without remarks behind them; optional parts without brackets."""
    lines = re.findall(r"^    ((?:python|autoplan) .*)", text.replace("\\\n", " "), flags=re.MULTILINE)
    found = [re.split(r" {2,}[(#]", line)[0] for line in lines] + [c.replace("\n", " ") for c in INLINE.findall(text)]
    return [re.sub(r"\|\w+", "", re.sub(r"[][]", "", line)) for line in found]


COMMANDS = [line for page in PAGES for line in commands(page.read_text())]
OF_AUTOPLAN = [line for line in COMMANDS if line.startswith("autoplan")]
OF_PYTHON = [line for line in COMMANDS if line.startswith("python")]


class Parsed(Exception):
    """The parser took all words."""


def parse(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command of a module read the words, and do nothing else."""
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    text = Path(str(module.__file__)).read_text()
    if found := re.search(r"(?:typer\.run|run_command)\((\w+)\)", text):
        app = typer.Typer(add_completion=False)
        app.command()(getattr(module, found[1]))
        typer.main.get_command(app).make_context(name, words)
        return
    real = argparse.ArgumentParser.parse_args

    def only_parse(self: argparse.ArgumentParser, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(Parsed):
        module.main()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of an import in torch itself
@pytest.mark.parametrize("line", OF_PYTHON)
def test_a_command_of_the_experiments_is_parsed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, flag, name, *words = shlex.split(line)
    assert flag == "-m"
    if name == "pytest":
        assert (ROOT / words[-1]).exists()
        return
    for word in words:
        if not word.startswith("-") and ("." in word or word.isupper()):  # a file that the command reads
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).touch()
    monkeypatch.chdir(tmp_path)
    parse(name, words, monkeypatch)


@pytest.mark.parametrize("line", OF_AUTOPLAN)
def test_a_command_of_autoplan_exists(line: str) -> None:
    flags_exist(line)


def sections(page: Path) -> dict[str, str]:
    """Return the text of every section of a page of experiments by its heading."""
    _, *parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_experiment_that_can_be_run_has_a_section() -> None:
    """Of its name, with its command, in the page of its folder. Left out are those that another experiment starts."""
    started = {"demo/worker.py", "faults/worker.py", "plans/planning_time_child.py", "gpu/run.py", "demo/run.py"}
    found = {
        str(path.relative_to(ROOT / "experiments"))
        for path in (ROOT / "experiments").rglob("*.py")
        if "__main__" in path.read_text()
    }
    assert started <= found
    for path in found - started:
        name = path.removesuffix(".py").removesuffix("/__main__")
        folder, _, heading = ("gpu/on_gpu" if name == "on_gpu" else name).partition("/")
        text = sections(ROOT / "experiments" / folder / "README.md").get(heading, "")
        assert f"    python -m experiments.{name.replace('/', '.')}" in text, path


def test_a_section_says_what_is_true_now() -> None:
    """Its prose has at most 500 words, tables and commands apart: a later run replaces an earlier one."""
    for page in PAGES:
        for heading, text in sections(page).items():
            prose = re.sub(r"^(?:    |\|)[^\n]*", "", text, flags=re.MULTILINE)
            assert len(re.findall(r"[A-Za-z0-9][\w.'-]*", prose)) <= 500, f"{page.parent.name}: {heading}"


def test_the_index_has_every_section() -> None:
    """Once; test_readme.py checks that its links lead to headings."""
    there = [
        f"{page.relative_to(INDEX.parent)}#{heading}" for page in PAGES if page != INDEX for heading in sections(page)
    ]
    assert len(there) >= 45
    assert sorted(re.findall(r"^\| \[[^]]*\]\(([^)]*)\)", INDEX.read_text(), flags=re.MULTILINE)) == sorted(there)


_GENERATED = {
    "hf_classes": r"Equal: (\d+) of the (\d+) classes",
    "model_zoo": r"Equal: (\d+) of (\d+) families",
    "package_classes": r"Equal: (\d+) of the (\d+) models",
    "checkpoints_matrix": r"\*\*(\d+) of (\d+)\*\* pairs",
    "faults": r"(\d+) survivors: (\d+) named",
    "restarts": r"(\d+) of (\d+) jobs run",
}


@pytest.mark.parametrize("page", _GENERATED)
def test_the_index_has_the_figures_of_a_generated_page(page: str) -> None:
    """A run writes its page by itself; the index, which people write, follows. So does README, where it has them."""
    (one, other), *_ = re.findall(_GENERATED[page], (ROOT / "docs" / f"{page}.md").read_text())
    figures = re.compile(rf"\b{one} of (?:the )?{other}\b")
    assert figures.search(INDEX.read_text()), (page, one, other)
    if page in ("hf_classes", "model_zoo"):
        assert figures.search(" ".join((ROOT / "README.md").read_text().split())), (page, one, other)


def test_what_does_not_exist_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(OF_PYTHON) >= 40 and len(OF_AUTOPLAN) >= 4
    assert commands("x\n    python -m a.b [--c D|E] \\\n        --f  # g\nand `autoplan plan\nM`") == [
        "python -m a.b --c D          --f",
        "autoplan plan M",
    ]
    with pytest.raises(ModuleNotFoundError):
        parse("experiments.plans.nothing", [], monkeypatch)
    with pytest.raises(SystemExit, match="2"):
        parse("experiments.compatibility.versions", ["--torhc", "2"], monkeypatch)
    with pytest.raises(Exception, match="No such option: --longre"):
        parse("experiments.plans.answer_time", ["--longre", "60"], monkeypatch)
    with pytest.raises(Exception, match="valid number"):
        parse("experiments.plans.answer_time", ["--longer", "long"], monkeypatch)
