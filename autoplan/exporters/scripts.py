"""Text of target values in scripts: flags of a command in a shell script, and Python.

Both are read, never run. What depends on values that the file does not hold is listed with its expression.
"""

from __future__ import annotations

import pprint
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoplan.exporters.programs import refuse_other_programs
from autoplan.exporters.python_file import read_made, read_python
from autoplan.exporters.python_values import MORE, UNKNOWN
from autoplan.exporters.schema import Schema
from autoplan.exporters.setup import Setup
from autoplan.exporters.shell import Word, shell_commands
from autoplan.exporters.syntax import commented


@dataclass(frozen=True)
class Name:
    """A name of Python, or a call of one without arguments, as a value."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Code:
    """An expression of Python as a value, of names that the function has."""

    text: str

    def __repr__(self) -> str:
        return self.text


# -- shell -------------------------------------------------------------------------------------------------------------

ENV = "env."  # of paths of environment variables
PROGRAMS = ("trl", "llamafactory-cli", "swift", "megatron", "axolotl")  # programs that start their own script
# Options of a launcher, which stand before the script -> path
_LAUNCHERS: Mapping[str, Mapping[str, str]] = {
    "torchrun": {
        **dict.fromkeys(("--nnodes",), "launch.nnodes"),
        **dict.fromkeys(("--nproc-per-node", "--nproc_per_node"), "launch.nproc_per_node"),
    },
    "deepspeed": {"--num_nodes": "launch.nnodes", "--num_gpus": "launch.nproc_per_node"},
    "accelerate": {},  # all of them are read, as `launch.options.NAME`
    **{program: {} for program in PROGRAMS},
    "srun": {"--nodes": "launch.nnodes", "-N": "launch.nnodes", "--ntasks-per-node": "launch.nproc_per_node"},
}
_MORE = re.compile(r"\$([@*]|\w*(ARG|OPT|EXTRA|PARAM|FLAG)\w*$)")  # names of variables that hold arguments
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")  # modules that are torchrun
# Words for true and false (HfArgumentParser's string_to_bool)
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "f", "n", "0"), False),
}


CommandOf = Callable[[Sequence[str], Sequence[str]], str | None]


@dataclass(frozen=True)
class FlagsOf:
    """A shell script that is read. Paths: the flag with `_` for `-`, `env.NAME`, `launch.NAME`.

    `launch.by` is the launcher, `launch.options.NAME` an option of accelerate's. `true` is a flag without a value.
    Values of a list stand one after the other.

    Attributes:
        schema: name of the target whose flags these are.
        marks: flags of which the command that trains has at least one, as paths.
        booleans: True if a flag that is true or false may have its value behind it.
        command_of: path, and what returns its value from the words up to the program and from its arguments; a command
            with such a value trains.
    """

    schema: str
    marks: tuple[str, ...]
    booleans: bool = False
    command_of: tuple[str, CommandOf] | None = None
    suffix: str = ".sh"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path. A flag that is given twice has its last value, as for argparse.

        Only the arguments of the command that trains count, and the numbers of nodes and processes of its launcher. The
        path of a flag begins with `?` if the script does not set its value, if it stands in a branch whose test is not
        known, and if several commands train with different values.
        """
        script = shell_commands(text, where)
        out: dict[str, Any] = {f"{ENV}{name}": literal_value(value) for name, value in script.variables.items()}
        found = [(before, self._told(before, after)) for before, after in map(command_parts, script.commands)]
        found = [(before, given) for before, given in found if self._trains(given)]
        trains = [each for each in found if each[0] and re.search("train|tune", each[0][-1].text)]
        found = trains or found  # what converts or generates has degrees, too
        known = self.command_of and self.command_of[0]  # what is told there is judged by who reads it
        refuse_other_programs([b[-1].text for b, given in found if b and known not in given], where)
        if not found:  # only the arguments, for a command that is elsewhere
            words = [*script.arguments, *(word for command in script.commands for word in command)]
            found = [([], self._arguments(words))]
            found[0][1].update(launch_values(words, {}))
        for before, _ in found:
            out |= launch_values(before, script.variables)
        return out | shared_arguments([given for _, given in found])

    def _told(self, before: Sequence[Word], after: Sequence[Word]) -> dict[str, Any]:
        """Return the values of the arguments, and what the program is told to do."""
        out = self._arguments(after)
        if self.command_of is not None:
            path, command_of = self.command_of
            command = command_of([word.text for word in before], [word.text for word in after])
            out |= {} if command is None else {path: command}
        return out

    def _trains(self, given: Mapping[str, Any]) -> bool:
        if self.command_of is not None and self.command_of[0] in given:
            return True
        return any(mark in given or f"{UNKNOWN}{mark}" in given for mark in self.marks)

    def _arguments(self, words: Sequence[Word]) -> dict[str, Any]:
        """Return the values of arguments by path."""
        entries = Schema.load(self.schema).entries
        out: dict[str, Any] = {}
        flag: str | None = None
        for word in words:
            token = word.text
            if re.match(r"--\w", token):
                name, equals, value = token.partition("=")
                flag = name.removeprefix("--").replace("-", "_")
                kinds = entries[flag].kinds if flag in entries else ()
                _set(out, flag, self._said(value, kinds) if equals else True, word.sure)
                continue
            if _MORE.match(token):
                out[f"{UNKNOWN}{token}"], flag = MORE, None
                continue
            known = None if flag is None else out.get(flag, out.get(UNKNOWN + flag))
            kinds = entries[flag].kinds if flag is not None and flag in entries else ()
            said = self._said(token, kinds) if known is True else None
            if flag is not None and isinstance(said, bool):
                _set(out, flag, said, word.sure)
                flag = None
                continue
            full = kinds == ("bool",) if known is True else bool(kinds) and "list" not in kinds
            if flag is None or full:
                out |= {f"{UNKNOWN}{token}": MORE} if token.startswith("$") else {}
                flag = None
                continue
            value_read = literal_value(token)
            new = value_read if known is True else [*(known if isinstance(known, list) else [known]), value_read]
            _set(out, flag, new, word.sure)
        return out

    def _said(self, text: str, kinds: Sequence[str]) -> Any:
        """Return the value of a flag whose field has these kinds."""
        given = _BOOLEANS.get(text.lower()) if self.booleans and "bool" in kinds else None
        return literal_value(text) if given is None else given


@dataclass(frozen=True)
class Flags(FlagsOf):
    """A shell script that starts a command with flags; false is not written.

    Attributes:
        launch: returns the lines that start the command, which has the arguments PLAN_ARGS.
    """

    launch: Callable[[Setup], list[str]] = field(kw_only=True)

    def write(self, values: Mapping[str, Any], heading: Sequence[str], about: Setup) -> str:
        """Return the script."""
        lines = ["#!/bin/bash", commented(heading).rstrip("\n")]
        lines += [f"export {path.removeprefix(ENV)}={v}" for path, v in values.items() if path.startswith(ENV)]
        lines.append("PLAN_ARGS=(")
        for path, value in values.items():
            if path.startswith((ENV, "launch.")) or value is False:
                continue
            each = [] if value is True else value if isinstance(value, list) else [value]
            flag = "--" + path.replace("_", "-")
            lines.append("    " + shlex.join([flag, *map(str, each)]))
        return "\n".join([*lines, ")", *self.launch(about)]) + "\n"


def command_parts(command: Sequence[Word]) -> tuple[list[Word], list[Word]]:
    """Return the words of a command up to the program that it runs, and its arguments; all of them if there is none.

    A program that starts another one has its words behind `--` (`python mason.py --gpus 8 -- torchrun train.py`).
    """
    dashes = next((k for k, word in enumerate(command) if word.text == "--"), None)
    if dashes is not None and command_parts(command[:dashes])[0]:  # not those of a launcher alone
        inner = command_parts(command[dashes + 1 :])
        if inner[0]:
            return inner
    for k, word in enumerate(command):
        module = k > 0 and command[k - 1].text == "-m" and word.text not in _TORCHRUN
        if (word.text.endswith(".py") and not word.text.startswith("-")) or module or word.text in PROGRAMS:
            return list(command[: k + 1]), list(command[k + 1 :])
    return [], list(command)


def launch_values(before: Sequence[Word], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return a launcher and its numbers of nodes and of processes per node; Slurm's where no other is below it."""
    words = ["torchrun" if word.text in _TORCHRUN else word.text.rpartition("/")[2] for word in before]
    launcher = next((name for name in _LAUNCHERS if name in words), "torchrun")
    options = _LAUNCHERS[launcher]
    out: dict[str, Any] = {"launch.by": launcher} if launcher in words else {}
    if launcher == "srun":
        said = {"launch.nnodes": "SLURM_NNODES", "launch.nproc_per_node": "SLURM_NTASKS_PER_NODE"}
        out |= {path: literal_value(variables[name]) for path, name in said.items() if name in variables}
    for word, after in zip(before, [*words[1:], ""], strict=False):
        name, equals, value = word.text.partition("=")
        given = value if equals else after
        if launcher == "accelerate" and name.startswith("--"):
            alone = not equals and (after.startswith("-") or after == words[-1])
            out[f"launch.options.{name.removeprefix('--')}"] = True if alone else literal_value(given)
        if name in options and "$" not in given:
            out[options[name]] = literal_value(given)
    return out


def shared_arguments(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments of one of several commands: those that they do not share are not known."""
    paths = dict.fromkeys(path.removeprefix(UNKNOWN) for given in found for path in given)
    out: dict[str, Any] = {}
    for path in paths:
        said = [given.get(path, given.get(f"{UNKNOWN}{path}")) for given in found]
        known = all(path in given for given in found) and all(value == said[0] for value in said)
        texts = dict.fromkeys("none" if value is None else str(value) for value in said)
        out[path if known else f"{UNKNOWN}{path}"] = said[0] if len(texts) == 1 else " or ".join(texts)
    return out


def _set(out: dict[str, Any], flag: str, value: Any, sure: bool) -> None:
    """Set the value of a flag; one that is not known replaces what was known before."""
    known = sure and "$" not in str(value)
    out.pop(f"{UNKNOWN}{flag}" if known else flag, None)
    out[flag if known else f"{UNKNOWN}{flag}"] = value


def literal_value(text: str) -> Any:
    """Return the number that a text is, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# -- Python ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Python:
    """A function that changes a configuration and returns it.

    Attributes:
        head: returns the lines before the assignments, and the name of the configuration.
        calls: path -> class: the values below it are arguments of one call.
        setters: end of the name of a function that sets one field of its first argument -> the field; None for files
            whose functions set nothing else than what the target's fields and defaults say.
    """

    head: Callable[[Setup, Mapping[str, Any]], tuple[list[str], str]]
    calls: Mapping[str, str]
    setters: Mapping[str, str] | None = field(default=None, hash=False)
    suffix: str = ".py"

    def write(self, values: Mapping[str, Any], heading: Sequence[str], about: Setup) -> str:
        """Return the module."""
        head, variable = self.head(about, values)
        lines, called = [commented(heading), *head], set()
        for path, value in values.items():
            place = next((each for each in self.calls if path.startswith(f"{each}.")), None)
            if place is None:
                lines.append(f"    {variable}.{path} = {_written(value)}")
            elif place not in called:
                called.add(place)
                below = {p.removeprefix(f"{place}."): v for p, v in values.items() if p.startswith(f"{place}.")}
                lines += _call(f"{variable}.{place}", self.calls[place], below)
        return "\n".join([*lines, f"    return {variable}"]) + "\n"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; the path of a value that is not a literal begins with `?`.

        So does a call of another function that takes the configuration, whose settings are not known.
        """
        return read_python(text, where, self.setters)


@dataclass(frozen=True)
class PythonCall:
    """A function that returns one object, made by nested calls.

    Attributes:
        head: lines before the function.
        name: the class of the object.
        modules: class -> module.
    """

    head: tuple[str, ...]
    name: str
    modules: Mapping[str, str]
    suffix: str = ".py"

    def write(self, values: Mapping[str, Any], heading: Sequence[str], about: Setup) -> str:
        """Return the module. A value of type Name is a class, whose arguments are below its path."""
        used = sorted({self.name, *(v.text for v in values.values() if isinstance(v, Name))})
        imports = [f"from {self.modules[name]} import {name}" for name in used]
        lines = [f"    return {self.name}("]
        for path, value in values.items():
            inside = next((p for p, v in values.items() if isinstance(v, Name) and path.startswith(f"{p}.")), None)
            if isinstance(value, Name):
                below = {p.removeprefix(f"{path}."): v for p, v in values.items() if p.startswith(f"{path}.")}
                given = ", ".join(f"{k}={v!r}" for k, v in below.items())
                lines.append(f"        {path}={value.text}({given}),")
            elif inside is None:
                lines.append(f"        {path}={value!r},")
        return "\n".join([commented(heading), *imports, *self.head, *lines, "        **settings,", "    )"]) + "\n"

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path; the path of a value that is not a literal begins with `?`."""
        return read_made(text, where, (self.name,))[1]


def _written(value: Any) -> str:
    return pprint.pformat(value, width=100, compact=True, sort_dicts=False).replace("\n", "\n        ")


def _call(target: str, name: str, below: Mapping[str, Any]) -> list[str]:
    if name == "dict.update":
        return [f"    {target}.update(", *(f"        {k}={_written(v)}," for k, v in below.items()), "    )"]
    return [f"    {target} = {name}(", *(f"        {k}={_written(v)}," for k, v in below.items()), "    )"]
