"""Models by name, without torch: `load_model("llama-3.1-70b")` reads a graph that was captured before.

    load_model("llama-3.1-70b")              # shipped with the package; loads no torch
    load_model("meta-llama/Llama-3.1-70B")   # the same, as people write it (`shipped_name`)
    load_model("llama3.1:70b")               # the same, with the number of parameters as a tag
    load_model("path/to/config.json")        # a Hugging Face config: captured on fake tensors, then cached
    load_model("my_package.models:make_gpt") # a function that returns a module (and its example inputs, loss)
    load_model("deepseek-v3@mtp=1")          # any of these, with a layer that predicts the token after the next

    python -m autoplan.catalog               # capture every shipped graph again, from profiles/model_configs
    python -m autoplan.catalog gpt2 qwen3-8b # only these

A shipped graph is `profiles/models/NAME.json.gz`: the graph's text, the hash of that text, and the source of the
published dimensions. tests/capture/test_catalog.py proves that capture still gives the same graph.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autoplan.config.keys import check_kind
from autoplan.errors import AutoplanError, CaptureError, GraphError
from autoplan.files import write_whole
from autoplan.ir.graph import ModelGraph
from autoplan.names import MTP, did_you_mean, matching, mtp_model, one_of, plain_name, same_letters
from autoplan.ops.record import OpKind
from autoplan.ops.table import nodes_with

_SUFFIX = ".json.gz"
_HASH_SEED = "0"  # shipped graphs are captured with it: some forwards of transformers go through a set of names
# Parts of a repository's name or tag that say how the weights were trained or stored; the shapes are the same.
_OF_THE_WEIGHTS = re.compile(
    r"^meta-|-(instruct|chat|text|thinking|hf|base|it|pt|0324|2507|latest|gguf|awq|gptq|qat|bnb-4bit|[bf]p?16|fp8|mxfp4"
    r"|i?q[2-8](-[01klmsx]+)*)(?=-|$)"
)
_FACTORY = re.compile(r"(?!\d)\w+(\.(?!\d)\w+)*:(?!\d)\w+")
# Keys of a config.json for the number of attention heads, and of heads of keys and values
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Description:
    """The dimensions of a model.

    Attributes:
        num_active_params: the number of parameters that one token uses.
        source: where the dimensions are published.
    """

    name: str
    num_params: int
    num_active_params: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    num_experts: int
    num_experts_per_token: int
    source: str


@dataclass(frozen=True)
class Usual:
    """The training run that a model is known for: what a command takes where nothing else is given.

    Attributes:
        seq_len: tokens per sequence.
        global_batch_size: sequences per step.
        tokens: of the whole run; None if they are not published.
        source: where the three are published, and which of them are assumed.
    """

    seq_len: int
    global_batch_size: int
    tokens: float | None
    source: str


def names() -> tuple[str, ...]:
    """Return the names of the shipped models, sorted."""
    folder = resources.files("autoplan.profiles") / "models"
    return tuple(sorted(f.name.removesuffix(_SUFFIX) for f in folder.iterdir() if f.name.endswith(_SUFFIX)))


def load_model(text: Path | str) -> ModelGraph:
    """Return the graph of a model.

    Args:
        text: one of three forms. A name of the catalog as people write it (`shipped_name`; loads no torch). The path of
            a Hugging Face `config.json` or of its folder. Or `package.module:factory`, a function without arguments
            that returns a module, `(module, example_inputs)` or `(module, example_inputs, loss_fn)`. At its end
            `@mtp=N` adds N layers that predict the tokens after the next (`autoplan.program.multi_token`).

    Raises:
        AutoplanError: names the candidates, the nearest names, the missing file, the problem of the factory, the op
            that cannot be captured, or why the model has no place for these layers.

    Example:
        >>> from autoplan import load_model
        >>> graph = load_model("meta-llama/Llama-3.1-8B")
        >>> graph.name
        'llama-3.1-8b'
    """
    check_kind("model", text, Path | str, "a name of `autoplan models`, the path of a config.json, or module:factory")
    text, num_mtp = split_changes(str(text))
    if num_mtp:
        from autoplan.program.multi_token import with_mtp

        return with_mtp(load_model(text), num_mtp)
    if text in names():
        return _shipped(text)[0]
    path = _config_path(text)
    if path is not None:
        from autoplan.capture.source import load_config

        return load_config(path)
    if is_factory(text):
        from autoplan.capture.source import load_factory

        module = text.partition(":")[0]
        if matching(module, names()) and find_spec(module.partition(".")[0]) is None:
            raise _unknown(text)
        return load_factory(text)
    return _shipped(shipped_name(text))[0]


def split_changes(text: str) -> tuple[str, int]:
    """Return a model without what `@` adds to it, and the number of layers that predict the tokens after the next.

    Raises: AutoplanError for another change, or a number that is none.
    """
    model, at, change = text.rpartition("@")
    if not at or "/" in change or not model:
        return text, 0
    name, _, value = change.partition("=")
    if name != MTP:
        raise AutoplanError(f"model {text!r}: {did_you_mean(name, [MTP])}; for example {mtp_model(model, 1)}")
    if not value.isdecimal():
        raise AutoplanError(
            f"model {text!r}: {MTP}={value!r} is no number of layers; for example {mtp_model(model, 1)}"
        )
    return model, int(value)


def _config_path(text: str) -> Path | None:
    """Return the config.json that a text names; None if it is another text. CaptureError if it is not there."""
    path = Path(text)
    if not text or text in names() or not (path.is_dir() or text.endswith(".json")):
        return None
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise CaptureError(f"model {text!r}: there is no file {path}")
    return path


def built_model(text: str) -> tuple[Any, Any] | None:
    """Return the module of a config.json or a factory, and its loss function or None; None for a shipped model.

    Raises: as `load_model`, and AutoplanError for a model with added layers, which no module has.
    """
    base, num_mtp = split_changes(text)
    if num_mtp:
        raise AutoplanError(
            f"model {text!r}: no module has the layers that @{MTP} adds, so that no program can run on one; plan, "
            f"rehearse and export it, compile {base}, or name a module that has them (package.module:factory)"
        )
    path = _config_path(text)
    if path is None and not is_factory(text):
        return None
    from autoplan.capture.source import built_of_config, built_of_factory

    model, _, loss_fn = built_of_factory(text) if path is None else built_of_config(path)
    return model, loss_fn


def is_factory(text: str) -> bool:
    """Return True if a text has the form `package.module:factory` and names no model (`phi3:mini`, `phi3:latest`)."""
    if _FACTORY.fullmatch(text) is None:
        return False
    return not any(same_letters(_bare(text), name) for name in names()) and not _by_tag(text)


def shipped_name(text: str) -> str:
    """Return the name of the shipped model that `text` means.

    It may be a name in any case, a unique beginning of one (`llama-3.1-8`), or the name of its repository or of one
    with the same shapes (`also` of its config), with or without the organisation and with ends that change no shape
    (`meta-llama/Llama-3.3-70B-Instruct`). A tag may follow a colon: `qwen3:8b`. If it is a number of parameters, a
    family whose names lack it has the model of that size: `deepseek-r1:671b`.

    Raises:
        AutoplanError: lists the candidates if it may mean several models, else the nearest names.
    """
    known = names()
    written = plain_name(text.strip("/").rsplit("/", 1)[-1])
    found = matching(text, known) or matching(written, known)
    if not found:
        bare = _bare(text)
        found = [n for n, others in _written_forms().items() if any(same_letters(bare, other) for other in others)]
        found = found or _by_tag(text)
    if not found:
        raise _unknown(text)
    if len(found) > 1:
        raise AutoplanError(f"model {text!r} {one_of(found)}")
    return found[0]


def _bare(text: str) -> str:
    """Return a name without its organisation and what it says of the weights; a tag is a part like any other."""
    return _without_weights(plain_name(text.strip("/").rsplit("/", 1)[-1]).replace(":", "-"))


def _by_tag(text: str) -> list[str]:
    """Return the models of the family before the colon; those of the tag's size if the tag is one."""
    family, colon, tag = plain_name(text).rpartition(":")
    family, size = _bare(family), re.fullmatch(r"(\d+)(\.\d+)?([mbt])", _without_weights(f"-{tag}").strip("-"))
    if not colon or not family or not (size or not _without_weights(f"-{tag}")):
        return []
    of_family = [n for n, others in _written_forms().items() if matching(family, others)]
    if size is None:
        return of_family
    digits, unit = 10 ** max(0, len(size[2] or "") - 1), _UNITS[size[3]]
    asked = round(float(size[1] + (size[2] or "")) * digits)
    counts = {n: configs()[n]["published_params"] / unit * digits for n in of_family}
    return [n for n, count in counts.items() if asked in (math.floor(count), round(count))]


def usual_run(text: str) -> Usual | None:
    """Return the usual run of a catalog model; None for a file, a factory, and a model without one.

    Raises:
        AutoplanError: for another name than `shipped_name` reads.
    """
    text, _ = split_changes(text)
    if is_factory(text) or text.endswith(".json") or Path(text).is_dir():
        return None
    said = _written_config(shipped_name(text)).get("usual")
    return None if said is None else Usual(**said)


def _without_weights(written: str) -> str:
    return _OF_THE_WEIGHTS.sub("", written)


def _written_forms() -> dict[str, tuple[str, ...]]:
    """Return, by shipped model, its name and those of repositories with its shapes, without organisation."""
    found = {}
    for name, config in configs().items():
        repository = re.match(r"https://huggingface\.co/[^/]+/([^/]+)", config["source"])
        others = [*([repository.group(1)] if repository else []), *config.get("also", ())]
        found[name] = (name, *(_without_weights(plain_name(other)) for other in others))
    return found


def describe_model(text: str) -> Description:
    """Return the dimensions of a shipped model, read off its graph, and of attention heads what its config says.

    A graph has no heads where attention is written out, and as many of keys as of queries where keys are repeated.

    Raises:
        AutoplanError: for another name than `shipped_name` reads.
    """
    base, num_mtp = split_changes(text)
    name = shipped_name(base)
    graph, source = _shipped(name)
    if num_mtp:
        graph = load_model(text)
    found, config = description(graph, graph.name, source), _written_config(name)["config"]
    heads, kv = (next((config[key] for key in keys if config.get(key)), None) for keys in (_HEADS, _KV_HEADS))
    return replace(found, num_heads=heads or found.num_heads, num_kv_heads=kv or found.num_kv_heads)


def description(graph: ModelGraph, name: str = "", source: str = "") -> Description:
    """Return the dimensions of any transformer's graph; 0 for parts that it does not have."""
    layers = [c for c in graph.calls if c.params and "." in c.name]
    heads, kv, vocab, hidden, experts, top_k = 0, 0, 0, 0, 0, 0
    for block, node in nodes_with(graph, OpKind.ATTENTION):
        query, keys = (block.values[n].shape for n in node.tensor_inputs[:2])
        heads, kv = max(heads, query[1].value or 0), max(kv, keys[1].value or 0)
    for block, node in nodes_with(graph, OpKind.EMBEDDING):
        rows, columns = (size.value or 0 for size in block.values[node.tensor_inputs[0]].shape)
        vocab, hidden = (rows, columns) if rows > vocab else (vocab, hidden)
    for _, node in nodes_with(graph, OpKind.EXPERTS):
        experts, top_k = max(experts, node.attrs["num_experts"]), max(top_k, node.attrs["top_k"])
    return Description(
        name=name or graph.name,
        num_params=graph.num_params,
        num_active_params=active_params(graph),
        num_layers=len(layers),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv,
        vocab_size=vocab,
        num_experts=experts,
        num_experts_per_token=top_k,
        source=source,
    )


def active_params(graph: ModelGraph) -> int:
    """Return the number of parameters that one token uses: `top_k` of the `num_experts` experts, and all others."""
    share: dict[tuple[str, str], tuple[int, int]] = {}
    for block, node in nodes_with(graph, OpKind.EXPERTS):
        for name in node.tensor_inputs[3:]:
            share[block.name, name] = (node.attrs["top_k"], node.attrs["num_experts"])
    idle = 0
    for call in graph.calls:
        for local, full in call.params.items():
            if (call.block, local) in share:
                used, among = share[call.block, local]
                idle += graph.params[full].num_elements * (among - used) // among
    return graph.num_params - idle


def _unknown(text: str) -> AutoplanError:
    known = names()
    near = difflib.get_close_matches(text.lower().replace(":", "-"), known, 3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return AutoplanError(
        f"unknown model {text!r}; {hint}use one of the {len(known)} names that autoplan models lists, the path of a "
        "Hugging Face config.json, or package.module:factory"
    )


def _shipped(name: str) -> tuple[ModelGraph, str]:
    """Return a shipped graph, with what its config says, and its source. Raises GraphError if the file is damaged."""
    stored = read_file((resources.files("autoplan.profiles") / "models" / f"{name}{_SUFFIX}").read_bytes(), name)
    written = _written_config(name)
    return ModelGraph.from_json(stored["graph"]).of_config({**written, **written["config"]}), stored["source"]


def _written_config(name: str) -> Mapping[str, Any]:
    """Return the file of a shipped model's config: the keys of `configs`."""
    file = resources.files("autoplan.profiles") / "model_configs" / f"{name}.json"
    written: Mapping[str, Any] = json.loads(file.read_text())
    return written


def read_file(data: bytes, name: str) -> Mapping[str, str]:
    """Return the contents of a shipped file: `content_hash`, `graph` (text), `source`.

    Raises:
        GraphError: if the file cannot be read, or its hash is wrong.
    """
    try:
        stored: dict[str, str] = json.loads(gzip.decompress(data))
        whole = hashlib.sha256(stored["graph"].encode()).hexdigest() == stored["content_hash"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as exc:
        raise GraphError(f"the shipped graph of {name} cannot be read: {exc}; install autoplan again") from exc
    if not whole:
        raise GraphError(f"the shipped graph of {name} does not have the hash it states; install autoplan again")
    return stored


# -- making the shipped graphs ----------------------------------------------------------------------------------------


def configs() -> dict[str, dict[str, Any]]:
    """Return the configs of all shipped graphs.

    Keys: `source`, `published_params`, `config`, `usual` (see `Usual`), `also` (repositories with the same shapes).
    """
    folder = resources.files("autoplan.profiles") / "model_configs"
    return {
        f.name.removesuffix(".json"): json.loads(f.read_text())
        for f in sorted(folder.iterdir(), key=lambda f: f.name)
        if f.name.endswith(".json")
    }


def capture_catalog_model(name: str) -> ModelGraph:
    """Capture a catalog model from its config. Raises AutoplanError for an unknown name."""
    from autoplan.capture.source import graph_of_config

    known = configs()
    if name not in known:
        raise AutoplanError(f"no config named {name!r}; there are {', '.join(known)}")
    # a shipped text has the hash of its graph, which leaves out results
    return replace(graph_of_config(known[name]["config"], name), name=name).without_results()


def _write(name: str, folder: Path) -> Path:
    graph = capture_catalog_model(name)
    stored = {"content_hash": graph.content_hash, "graph": graph.to_json(), "source": configs()[name]["source"]}
    data = gzip.compress(json.dumps(stored, sort_keys=True).encode(), 9, mtime=0)  # no time: equal graphs, equal bytes
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{_SUFFIX}"
    write_whole(path, data)
    return path


def main(arguments: Sequence[str]) -> None:
    """Capture the named models (default: all) and write their graphs into profiles/models."""
    import autoplan.profiles

    folder = Path(autoplan.profiles.__path__[0]) / "models"
    for name in arguments or list(configs()):
        path = _write(name, folder)
        about = describe_model(name)
        print(f"{name}: {about.num_params:,} parameters, {about.num_layers} layers, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
        os.environ["PYTHONHASHSEED"] = _HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "autoplan.catalog", *sys.argv[1:]])
    try:
        main(sys.argv[1:])
    except AutoplanError as _refused:
        sys.exit(str(_refused))
