"""The first answers of the tutorials: which commands they are, and that an answer that is not there is an error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.plans.first_answers import PAGES, NoAnswer, answered, first_commands


def test_every_tutorial_has_a_first_question() -> None:
    pages = [page for page in sorted(PAGES.glob("*.md")) if page.stem != "README"]
    assert len(pages) == 6
    commands = {page.stem: first_commands(page) for page in pages}
    assert commands["pretrain"] == ["autoplan plan llama-3.1-8b --cluster 16xh100"]
    assert [line.split()[1] for line in commands["platform"]] == ["estimate", "export", "check"]
    assert commands["embed"][0].startswith("python - <<'END'\nimport json\n")


def test_an_answer_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    page, programs = tmp_path / "page.md", Path(sys.executable).parent
    page.write_text("# Why?\n\n```python\nprint(6 * 7)\n```\n")
    found = answered(page, programs)
    assert (found.question, found.commands, found.last_line) == ("Why?", 1, "42")
    page.write_text("# Why?\n\n    autoplan --no-such-flag\n")
    with pytest.raises(NoAnswer, match="exit code 2"):
        answered(page, programs)
    page.write_text("# Why?\n\n```python\npass\n```\n")
    with pytest.raises(NoAnswer, match="said nothing"):
        answered(page, programs)
    page.write_text("# Why?\n")
    with pytest.raises(NoAnswer, match="neither"):
        first_commands(page)
