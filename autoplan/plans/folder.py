"""A program for the whole cluster in a folder, and the checks before it runs.

| file | what it holds |
|---|---|
| `stageN.py` | the module of a pipeline stage, the same text on every rank of it |
| `program.json` | the ProgramSpec: mesh, parameters and their shards, schedule, ledger of collectives |
| `plan.json` | the plan (autoplan.plans.document) |
| `fingerprint.json` | SHA-256 of the files above; facts of the model (below) |

`parallelize(model, program=FOLDER)` runs it without a capture, after `check_model`: every parameter of the program is
in the model with this name, shape and dtype, trained or frozen as here; every trained parameter of the model is in the
program, or had no influence on the loss; the buffers agree in name, shape and dtype; so do the class, the config of a
Hugging Face model in every value that its forward may read, and the numbers that the forward and the loss function read
(autoplan.runtime.given_numbers). The forward itself is not compared (verify='required' captures it and does).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.codegen.program import Program
from autoplan.config.keys import check_names
from autoplan.errors import CaptureError, PinError
from autoplan.files import write_whole
from autoplan.ir.graph import ModelGraph
from autoplan.plans.differences import differences_text
from autoplan.plans.record import Plan
from autoplan.runtime.spec import ParamSpec, ProgramSpec
from autoplan.versions import __version__

FINGERPRINT_VERSION = 3
_PLAN, _PROGRAM, _PRINT = "plan.json", "program.json", "fingerprint.json"
_FINGERPRINT: Mapping[str, type | tuple[type, ...]] = {
    "schema": int,
    "autoplan": str,
    "model": str,
    "graph": str,
    "class": (str, type(None)),
    "config": Mapping,
    "numbers": Mapping,
    "unused": list,
    "buffers": Mapping,
    "files": Mapping,
}
# Values of a Hugging Face config that change no forward of training: names, versions, generation.
_NOT_COMPUTED = frozenset(
    (
        *("architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "return_dict", "name_or_path"),
        *("output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id", "id2label", "label2id"),
        *("max_length", "min_length", "do_sample", "num_beams", "temperature", "top_k", "top_p"),
    )
)


@dataclass(frozen=True)
class TensorOutline:
    """A parameter or buffer without its values."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ModelOutline:
    """The facts by which a module is recognised.

    Attributes:
        parameters: each once, by its first name; buffers likewise.
        facts: its class, config and numbers, and the names of its trained parameters (`captured.model_facts`).
    """

    parameters: Mapping[str, TensorOutline]
    buffers: Mapping[str, TensorOutline]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class ProgramFolder:
    """The contents of a program folder."""

    path: Path
    plan: Plan
    program: Program
    fingerprint: Mapping[str, Any]


def write_program(
    folder: Path, plan: Plan, program: Program, buffers: Mapping[str, str], facts: Mapping[str, Any]
) -> None:
    """Write a program with its plan and its fingerprint, the fingerprint last. What an earlier program left is removed.

    Args:
        buffers: the dtype and shape of every buffer of the graph (`buffer_texts`).
        facts: class, config and numbers of the model, and the names of its trained parameters.

    Raises:
        PinError: the folder cannot be written.
    """
    files = {**program.sources, _PROGRAM: program.spec.to_json(), _PLAN: plan.to_json()}
    used = {p.name for stage in program.spec.stages for p in stage.params}
    fingerprint = {
        "schema": FINGERPRINT_VERSION,
        "autoplan": __version__,
        "model": plan.model,
        "graph": plan.graph_hash,
        "class": facts.get("class"),
        "config": dict(facts.get("config", {})),
        "numbers": dict(facts.get("numbers", {})),
        "unused": [name for name in facts.get("trained", ()) if name not in used],
        "buffers": dict(buffers),
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()},
    }
    earlier = _earlier(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**files, _PRINT: json.dumps(fingerprint, indent=1)}.items():
            write_whole(folder / name, text)
        for name in earlier - files.keys():
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise PinError(f"{folder} cannot be written ({error.strerror or error}); name another folder") from error


def _earlier(folder: Path) -> set[str]:
    """Return the names of the unchanged files of an earlier program in a folder."""
    try:
        return set(_texts(folder, _fingerprint(folder)))
    except PinError:  # none, or one that somebody has changed
        return set()


def buffer_texts(graph: ModelGraph) -> dict[str, str]:
    """Return dtype and shape of every buffer of a graph, as text."""
    return {name: str(TensorOutline(b.shape, b.dtype)) for name, b in graph.buffers.items()}


def read_program(folder: Path) -> ProgramFolder:
    """Return the program in a folder.

    Raises:
        PinError: the folder holds no program, or a file is missing, damaged or changed; names the file.
    """
    fingerprint = _fingerprint(folder)
    if fingerprint["autoplan"] != __version__:
        raise PinError(
            f"the program in {folder} was written by autoplan {fingerprint['autoplan']}, and this is {__version__}; "
            "compile the plan again"
        )
    texts = _texts(folder, fingerprint)
    try:
        spec = ProgramSpec.from_json(texts[_PROGRAM])
    except (ValueError, KeyError, TypeError) as error:
        raise PinError(f"{folder / _PROGRAM} cannot be read: {error}; compile the plan again") from None
    sources = {name: text for name, text in texts.items() if not name.endswith(".json")}
    lacking = [stage.source for stage in spec.stages if stage.source not in sources]
    if lacking:
        raise _damaged(folder / _PRINT, f"files: {lacking[0]}")
    plan = Plan.from_json(texts[_PLAN], str(folder / _PLAN))
    if plan.axes != spec.axes:
        raise PinError(f"{folder / _PLAN} is the plan of another program; compile the plan again")
    return ProgramFolder(folder, plan, Program(spec, sources), fingerprint)


def _fingerprint(folder: Path) -> Mapping[str, Any]:
    """Return the checked fingerprint of the program in a folder."""
    path = folder / _PRINT
    if not path.is_file():
        raise PinError(
            f"{folder} holds no program (there is no {path.name}); write one with `autoplan compile MODEL PLAN --out "
            f"{folder}` or autoplan.compile(model, plan, {str(folder)!r})"
        )
    try:
        fingerprint = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PinError(f"{path} cannot be read ({error}); compile the plan again") from None
    if not isinstance(fingerprint, Mapping) or fingerprint.get("schema") != FINGERPRINT_VERSION:
        raise PinError(f"{path} is not of this version; compile the plan again")
    check_names(fingerprint, tuple(_FINGERPRINT), str(path))
    wrong = [name for name, kind in _FINGERPRINT.items() if not isinstance(fingerprint.get(name, ...), kind)]
    files = {} if wrong else fingerprint["files"]
    wrong += [f"files: {name}" for name in (_PROGRAM, _PLAN) if name not in files and not wrong]
    wrong += [f"files: {name}" for name, digest in files.items() if Path(name).name != name or type(digest) is not str]
    if wrong:
        raise _damaged(path, wrong[0])
    return fingerprint


def _damaged(path: Path, what: str) -> PinError:
    return PinError(f"{path} is damaged ({what} is missing, or of another kind); compile the plan again")


def _texts(folder: Path, fingerprint: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of every file of a program. PinError for one that is missing or changed."""
    texts = {}
    for name, wanted in fingerprint["files"].items():
        file = folder / name
        try:
            texts[name] = file.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise PinError(f"{file} cannot be read ({error}); compile the plan again") from None
        if hashlib.sha256(texts[name].encode()).hexdigest() != wanted:
            raise PinError(f"{file} is not as it was written; compile the plan again")
    return texts


def check_model(given: ProgramFolder, model: ModelOutline) -> None:
    """Raise CaptureError, naming what differs, unless the module is the one that the program was made for."""
    unused = frozenset(given.fingerprint["unused"])
    found = _parameters(given.program.spec, model.parameters, unused)
    found += _buffers(given.fingerprint["buffers"], model.buffers)
    found += _facts(given.fingerprint, model.facts)
    if found:
        raise CaptureError(
            f"the program in {given.path} was made for another model: {differences_text(found)}; compile a plan of "
            "this model"
        )


def _parameters(spec: ProgramSpec, model: Mapping[str, TensorOutline], unused: Set[str]) -> list[str]:
    wanted: dict[str, ParamSpec] = {p.name: p for stage in spec.stages for p in stage.params}
    found = [f"parameter {name} is missing" for name in wanted if name not in model]
    found += [
        f"parameter {name} is trained, but not in the program"
        for name, p in model.items()
        if p.trainable and name not in wanted and name not in unused
    ]
    for name, p in wanted.items():
        mine = model.get(name)
        if mine is None:
            continue
        shape, computed = tuple(p.shape), spec.compute_dtype is not None and p.dtype == spec.compute_dtype
        as_any = computed and "float" in mine.dtype  # kept in float32 whatever the model's dtype is
        if mine.shape != shape or (mine.dtype != p.dtype and not as_any):
            found.append(f"parameter {name} is {mine}, in the program {TensorOutline(shape, p.dtype)}")
        elif mine.trainable != p.trainable:
            words = {True: "trained", False: "frozen"}
            found.append(f"parameter {name} is {words[mine.trainable]}, in the program {words[p.trainable]}")
    return found


def _buffers(wanted: Mapping[str, str], model: Mapping[str, TensorOutline]) -> list[str]:
    found = []
    for name, text in wanted.items():
        if name not in model:
            found.append(f"buffer {name} is missing")
        elif str(model[name]) != text:
            found.append(f"buffer {name} is {model[name]}, in the program {text}")
    return found


def _facts(wanted: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    found = []
    if wanted["class"] is not None and wanted["class"] != model["class"]:
        found.append(f"its class is {model['class']}, in the program {wanted['class']}")
    for name, value in wanted["config"].items():
        compared = name in model["config"] and not name.startswith("_")
        if compared and name not in _NOT_COMPUTED and _differ(value, model["config"][name]):
            found.append(f"config.{name} is {model['config'][name]!r}, in the program {value!r}")
    mine = model["numbers"]
    found += [
        f"{name} is {mine[name]}, in the program {value}"
        for name, value in wanted["numbers"].items()
        if name in mine and mine[name] != value
    ]
    return found


def _differ(then: Any, now: Any) -> bool:
    """Return True if two values of a config differ. Of mappings common names count: versions of a library add names."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        return any(_differ(then[name], now[name]) for name in then if name in now)
    return bool(then != now)
