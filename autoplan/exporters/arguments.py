"""Arguments of commands in other places than flags: a YAML file of them, and `name=value` behind a program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.errors import PinError
from autoplan.exporters.python_values import UNKNOWN
from autoplan.exporters.schema import Schema
from autoplan.exporters.scripts import ENV, command_parts, launch_values, literal_value, shared_arguments
from autoplan.exporters.shell import Word, shell_commands
from autoplan.exporters.syntax import Yaml, values_of_named


@dataclass(frozen=True)
class FlagsYaml:
    """A YAML file with a section of flags and one of environment variables, as Megatron-LM's own tests have them.

    Attributes:
        schema: name of the target whose flags these are.
        flags, environment: names of the sections.
    """

    schema: str
    flags: str = "MODEL_ARGS"
    environment: str = "ENV_VARS"
    suffix: str = ".yaml"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path, as those of a script (`FlagsOf`); false is a flag that is not given."""
        entries = Schema.load(self.schema).entries
        out: dict[str, Any] = {}
        for path, value in Yaml().read(text, where).items():
            section, _, name = path.partition(".")
            if section == self.environment:
                out[f"{ENV}{name}"] = value
            if section != self.flags or not name.startswith("--") or value in (None, False):
                continue
            flag = name.removeprefix("--").replace("-", "_")
            words = [literal_value(word) for word in value.strip("[]").split()] if isinstance(value, str) else [value]
            several = flag in entries and "list" in entries[flag].kinds and isinstance(value, str)
            known = "$" not in str(value)
            out[flag if known else f"{UNKNOWN}{flag}"] = words if several else words[0] if len(words) == 1 else value
        return out


@dataclass(frozen=True)
class NamedValues:
    """A shell script whose command has arguments `name=value`, behind a file of such values.

    Attributes:
        schema: name of the target whose values these are.
        program: a pattern of the program that trains.
        file: path of the name of the file.
    """

    schema: str
    program: str
    file: str
    suffix: str = ".sh"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; what several commands do not share is not known (`FlagsOf`)."""
        script = shell_commands(text, where)
        commands = map(command_parts, script.commands)
        found = [(before, self._named(after)) for before, after in commands if self._trains(before)]
        out: dict[str, Any] = {f"{ENV}{name}": literal_value(value) for name, value in script.variables.items()}
        for before, _ in found:
            out |= launch_values(before, script.variables)
        return out | shared_arguments([named for _, named in found]) if found else {}

    def _trains(self, before: Sequence[Word]) -> bool:
        return bool(before) and re.search(self.program, before[-1].text) is not None

    def _named(self, words: Sequence[Word]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for word in words:
            name, equals, value = word.text.removeprefix("--").partition("=")
            if not equals and re.search(r"\.ya?ml$", name) and self.file not in out:
                out[self.file] = re.sub(r"^.*(\}|\$\w+)/", "", name)  # of a folder that nobody knows, what is below it
            elif equals and re.fullmatch(r"\w+", name):
                known = word.sure and "$" not in value
                out.pop(f"{UNKNOWN}{name}" if known else name, None)
                out[name if known else f"{UNKNOWN}{name}"] = _said(value) if known else value
        return out


@dataclass(frozen=True)
class NamedFiles:
    """A shell script whose command takes files of values, and flags that count more: `--name value` or `--name=value`.

    Attributes:
        program: a pattern of the program that takes them.
        folder: flags of the folder that they are in.
        ending: the suffix of a name without one.
    """

    program: str
    folder: tuple[str, ...]
    ending: str
    suffix: str = ".sh"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values of all files by path; nothing for another script, and for several such commands.

        Raises: PinError for a file that is not there.
        """
        script = shell_commands(text, where)
        parts = map(command_parts, script.commands)
        found = [
            (before, [word.text for word in after])
            for before, after in parts
            if before and re.search(self.program, before[-1].text)
        ]
        if len(found) != 1:
            return {}
        ((before, words),) = found
        return self._files(words, where) | launch_values(before, script.variables)

    def _files(self, words: Sequence[str], where: str) -> dict[str, Any]:
        folder, names, flags, out = "", list[str](), dict[str, Any](), dict[str, Any]()
        left = iter(words)
        for word in left:
            if word in self.folder:
                folder = next(left, "")
            elif word.startswith("--"):
                name, equals, value = word.removeprefix("--").partition("=")
                flag = value if equals else next(left, "")
                flags[f"{UNKNOWN}{name}" if "$" in flag else name] = flag if "$" in flag else _said(flag)
            elif not word.endswith(".py"):
                names.append(word)
        for name in names:
            path = str(Path(folder) / (name if name.endswith((self.ending, ".json")) else name + self.ending))
            values = values_of_named("", path, where)
            if not values:
                raise PinError(f"{where} names {path}, which is not found; nearest: its path from here")
            out |= {key.removeprefix("."): value for key, value in values.items()}
        for name in flags:  # which replace a value, or the section that a file leaves out
            path = name.removeprefix(UNKNOWN)
            while path:
                out.pop(path, None)
                path = path.rpartition(".")[0]
        return out | flags


_WORDS = {"true": True, "false": False, "none": None, "null": None}


def _said(text: str) -> Any:
    return _WORDS[text.lower()] if text.lower() in _WORDS else literal_value(text)
