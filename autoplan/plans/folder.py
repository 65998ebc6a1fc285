"""A program for the whole cluster in a folder, and the checks before it runs.

| file | what it holds |
|---|---|
| `stageN.py` | the module of a pipeline stage, the same text on every rank of it |
| `program.json` | the ProgramSpec: mesh, parameters and their shards, schedule, ledger of collectives |
| `plan.json` | the plan (autoplan.plans.document) |
| `fingerprint.json` | SHA-256 of the files above; of the model its class, its config and its buffers |

`parallelize(model, program=FOLDER)` runs it without a capture, after `check_model`: every parameter of the program is
in the model with this name, shape and dtype, trained or frozen as here; every trained parameter of the model is in the
program; the buffers agree in name, shape and dtype; so do the class, and the config of a Hugging Face model in every
value that its forward may read. The forward itself is not compared (verify='required' captures it and does).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.codegen.program import Program
from autoplan.config.keys import check_names
from autoplan.errors import CaptureError, PinError
from autoplan.files import write_whole
from autoplan.ir.graph import ModelGraph
from autoplan.plans.differences import differences_text
from autoplan.plans.document import read_json
from autoplan.plans.record import Plan
from autoplan.runtime.spec import ParamSpec, ProgramSpec
from autoplan.versions import __version__

FINGERPRINT_VERSION = 1
_FINGERPRINT = ("schema", "autoplan", "model", "graph", "class", "config", "buffers", "files")
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
        facts: its class and config, as `fingerprint.json` keeps them.
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
    """Write a program with its plan and its fingerprint, the fingerprint last.

    Args:
        buffers: the dtype and shape of every buffer of the graph (`buffer_texts`).
        facts: class and config of the model.
    """
    files = {**program.sources, "program.json": program.spec.to_json(), "plan.json": plan.to_json()}
    fingerprint = {
        "schema": FINGERPRINT_VERSION,
        "autoplan": __version__,
        "model": plan.model,
        "graph": plan.graph_hash,
        "class": facts.get("class"),
        "config": dict(facts.get("config", {})),
        "buffers": dict(buffers),
        "files": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**files, "fingerprint.json": json.dumps(fingerprint, indent=1)}.items():
        write_whole(folder / name, text)


def buffer_texts(graph: ModelGraph) -> dict[str, str]:
    """Return dtype and shape of every buffer of a graph, as text."""
    return {name: str(TensorOutline(b.shape, b.dtype)) for name, b in graph.buffers.items()}


def read_program(folder: Path) -> ProgramFolder:
    """Return the program in a folder.

    Raises:
        PinError: the folder holds no program, or a file is missing, damaged or changed; names the file.
    """
    path = folder / "fingerprint.json"
    if not path.is_file():
        raise PinError(
            f"{folder} holds no program (there is no {path.name}); write one with `autoplan compile MODEL PLAN --out "
            f"{folder}` or autoplan.compile(model, plan, {str(folder)!r})"
        )
    fingerprint = read_json(path)
    if not isinstance(fingerprint, Mapping) or fingerprint.get("schema") != FINGERPRINT_VERSION:
        raise PinError(f"{path} is not of this version; compile the plan again")
    check_names(fingerprint, _FINGERPRINT, str(path))
    texts = {}
    for name, wanted in fingerprint["files"].items():
        file = folder / name
        try:
            texts[name] = file.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise PinError(f"{file} cannot be read ({error}); compile the plan again") from None
        if hashlib.sha256(texts[name].encode()).hexdigest() != wanted:
            raise PinError(f"{file} is not as it was written; compile the plan again")
    try:
        spec = ProgramSpec.from_json(texts["program.json"])
    except (ValueError, KeyError, TypeError) as error:
        raise PinError(f"{folder / 'program.json'} cannot be read: {error}; compile the plan again") from None
    sources = {name: text for name, text in texts.items() if not name.endswith(".json")}
    plan = Plan.from_json(texts["plan.json"], str(folder / "plan.json"))
    return ProgramFolder(folder, plan, Program(spec, sources), fingerprint)


def check_model(given: ProgramFolder, model: ModelOutline) -> None:
    """Raise CaptureError, naming what differs, unless the module is the one that the program was made for."""
    found = [*_parameters(given.program.spec, model.parameters), *_buffers(given.fingerprint["buffers"], model.buffers)]
    found += _facts(given.fingerprint, model.facts)
    if found:
        raise CaptureError(
            f"the program in {given.path} was made for another model: {differences_text(found)}; compile a plan of "
            "this model"
        )


def _parameters(spec: ProgramSpec, model: Mapping[str, TensorOutline]) -> list[str]:
    wanted: dict[str, ParamSpec] = {p.name: p for stage in spec.stages for p in stage.params}
    found = [f"parameter {name} is missing" for name in wanted if name not in model]
    found += [
        f"parameter {name} is trained, but not in the program"
        for name, p in model.items()
        if p.trainable and name not in wanted
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
        compared = name in model["config"] and value is not None and not name.startswith("_")
        if compared and name not in _NOT_COMPUTED and _differ(value, model["config"][name]):
            found.append(f"config.{name} is {model['config'][name]!r}, in the program {value!r}")
    return found


def _differ(then: Any, now: Any) -> bool:
    """Return True if two values of a config differ. Of mappings common names count: versions of a library add names."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        return any(_differ(then[name], now[name]) for name in then if name in now and then[name] is not None)
    return bool(then != now)
