"""What is typed on the command line or stands in files as values: pins, lists, what is varied, how a run is set up.

PinError says what would work. Options of a run are also written here: as words, texts and plain data.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from autoplan.config.parallel import Attention, Dispatcher, Launch, RunOptions
from autoplan.config.recompute import check_choice
from autoplan.cost_models.whole_run import Assumptions
from autoplan.errors import PinError
from autoplan.report.numbers import read_count, read_series
from autoplan.search.layouts import PlanRequest
from autoplan.sweeps.whatif import LISTS, RANGES, TEXTS, VARIED, WHOLE

_COMMA = re.compile(r",(?!\s*[A-Za-z_]+\s*=)")  # not that of `@nic=400,price=2`
_PIN = re.compile(r",(?=\s*[A-Za-z_]+\s*=)")
_SHORT = {"gbs": "global_batch_size", "seq": "seq_len"}


def read_pins(texts: Sequence[str]) -> dict[str, Any]:
    """`tp=8`, `stages=10,11,11`, and several of them in one text: `tp=8,pp=2`."""
    pins: dict[str, Any] = {}
    for text in texts:
        for part in _PIN.split(text):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not name or not value:
                raise PinError(f"pin {part!r} is not name=value, for example --pin tp=8")
            if name in pins:
                raise PinError(f"pin {name} is given twice")
            pins[name] = _read_value(name, value)
    return pins


def _read_value(name: str, value: str) -> object:
    if name == "stages":
        return read_list(f"pin stages={value}", value)
    if re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    return float(value) if re.fullmatch(r"[+-]?\d+\.\d*", value) else value


def read_assumptions(texts: Sequence[str]) -> Assumptions:
    """`mtbf_device_days=2000`, and several of them in one text: `pue=1.1,usd_per_kwh=0.08`."""
    given: dict[str, object] = {}
    for text in texts:
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name in given:
                raise PinError(f"--assume {name} is given twice")
            try:
                given[name] = float(value)
            except ValueError:
                raise PinError(f"--assume {part!r} is not name=number, for example --assume pue=1.1") from None
    return Assumptions.of(given, "--assume")


def read_list(what: str, text: str) -> tuple[int, ...]:
    """`10,11,11`."""
    if re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")) is None:
        raise PinError(f"{what}: must be whole numbers with commas, for example 10,11,11")
    return tuple(int(part) for part in text.split(","))


def read_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`nodes=8,16`, `nic=100..1600` (doubled), `device=h100-sxm5-80gb,h200-sxm-141gb`, `stages=8,8/10,6`: lists
    of values by name."""
    out: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = (piece.strip() for piece in text.partition("="))
        name = _SHORT.get(name, name.replace("-", "_"))
        if not equals or not values:
            raise PinError(f"vary {text!r} is not name=values, for example --vary nodes=8,16,32")
        if name in out:
            raise PinError(f"vary {name} is given twice; write all values with commas")
        if name not in VARIED:
            raise PinError(f"cannot vary {name!r}; what can be varied: {', '.join(VARIED)}")
        if name in TEXTS or name in LISTS:
            parts = _values(name, values)
            out[name] = [read_list(f"vary {name}={part}", part) for part in parts] if name in LISTS else parts
        else:
            whole = name in WHOLE
            out[name] = list(read_series(values, f"vary {name}", whole=whole, binary=whole, within=RANGES.get(name)))
    return out


def _values(name: str, text: str) -> list[str]:
    """Values with commas between them, or with `/` where a value has commas of its own: `stages=8,8/10,6`."""
    if "/" not in text and (name in LISTS or re.search(r"modules:[^,]*,", text)):
        if name in LISTS:
            return [text]
        raise PinError(f"vary {name}={text}: write / between values, for example recompute=full/modules:core_attn,mlp")
    parts = text.split("/") if "/" in text and name not in ("device", "cluster") else _COMMA.split(text)
    return [part.strip() for part in parts if part.strip()]


_LAYERS = re.compile(r"(\d+)(?:-(\d+))?")  # layers in model order, from 0: `4`, or `0-3`


def read_recompute(text: str, layers: Sequence[str]) -> str | tuple[int, ...] | dict[str, str]:
    """A choice of recompute for all layers; how many layers per stage are recomputed in full (`3,0`); or one by layer.

    Args:
        text: by layer `0-3=full,4-31=attention+norms`, or with the names of blocks; what is not named keeps all.
        layers: the names of the model's layers, in its order.

    Raises: PinError for a layer that the model does not have, or that is named twice.
    """
    if re.fullmatch(r"\d+(,\d+)*", text):
        return read_list(f"--recompute {text}", text)
    if "=" not in text:
        return check_choice(text)
    out: dict[str, str] = {}
    for part in text.split(","):
        which, _, how = (piece.strip() for piece in part.partition("="))
        numbers = _LAYERS.fullmatch(which)
        names: Sequence[str] = [which]
        if numbers is not None:
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if not first <= last < len(layers):
                raise PinError(
                    f"--recompute {text}: {which} must be layers from 0 to {len(layers) - 1}; nearest legal: "
                    f"{min(first, len(layers) - 1)}-{len(layers) - 1}={how or 'full'}"
                )
            names = layers[first : last + 1]
        if not how or not which or any(name in out for name in names):
            raise PinError(f"--recompute {text}: {part!r} is not LAYERS=CHOICE (0-3=full), each layer once")
        out |= dict.fromkeys(names, check_choice(how))
    return out


def recompute_text(recompute: str | Mapping[str, str] | Sequence[int], layers: Sequence[str]) -> str:
    """What `read_recompute` reads as `recompute`, or as what comes to the same."""
    if isinstance(recompute, str):
        return recompute
    if not isinstance(recompute, Mapping):
        return ",".join(map(str, recompute)) if any(recompute) else "none"
    parts = [f"{name}={how}" for name, how in recompute.items() if name not in layers and how != "none"]
    first = 0
    for how, run in itertools.groupby(layers, key=lambda name: recompute.get(name, "none")):
        last = first + len(list(run)) - 1
        if how != "none":
            parts.append(f"{first}={how}" if first == last else f"{first}-{last}={how}")
        first = last + 1
    return ",".join(parts) or "none"


def read_methods(text: str | None) -> str | dict[str, str] | None:
    """Of context parallelism: `ring`, or by block `layer=ring,layer1=ulysses`."""
    if text is None or "=" not in text:
        return text
    out: dict[str, str] = {}
    for part in text.split(","):
        block, equals, name = (piece.strip() for piece in part.partition("="))
        if not equals or not block or not name or block in out:
            raise PinError(f"--context-method {text}: {part!r} is not BLOCK=METHOD, each block once")
        out[block] = name
    return out


def read_options(
    attention: str | None = None,
    launch: str = "async",
    overlap: str | None = None,
    dispatcher: str | None = None,
    sequence_parallel: bool = True,
    fused_experts: bool = False,
    narrow_gather: bool = False,
    fused_loss: bool = False,
    overlap_zero: bool = True,
    document_len: int | str | None = None,
    overlap_gather: bool = True,
    zero_by_tensor: bool = False,
) -> RunOptions:
    """The kernel of attention, how kernels start, what overlaps, by comma: `tp,ep`, how rows travel to experts, and
    what `RunOptions` says of the rest. PinError names what is not known and what is."""
    if dispatcher is not None and dispatcher not in tuple(Dispatcher):
        raise PinError(f"dispatcher {dispatcher!r} is not known; use {', '.join(Dispatcher)}")
    if attention is not None and attention not in tuple(Attention):
        raise PinError(f"attention {attention!r} is not known; use {', '.join(Attention)}")
    if launch not in tuple(Launch):
        raise PinError(f"launch {launch!r} is not known; use {', '.join(Launch)}")
    beside = frozenset(part.strip() for part in (overlap or "").split(",") if part.strip())
    return RunOptions(
        None if attention is None else Attention(attention),
        Launch(launch),
        beside,
        Dispatcher(dispatcher or Dispatcher.ALL_TO_ALL),
        sequence_parallel,
        fused_experts,
        narrow_gather,
        fused_loss,
        overlap_zero,
        read_count(document_len, "document_len") if isinstance(document_len, str) else document_len,
        overlap_gather,
        zero_by_tensor,
    )


OPTIONS = tuple(f.name for f in fields(RunOptions))  # keys of files, and names on the command line with `-` for `_`
_SWITCHES = tuple(f.name for f in fields(RunOptions) if isinstance(f.default, bool))


def options_of(data: object) -> RunOptions:
    """Of a mapping by the names of `OPTIONS`, as a file holds it; `overlap` a list, or text with commas.

    None, and what is left out or None in it: the defaults. PinError names the key, its value and what works.
    """
    if data is None or isinstance(data, RunOptions):
        return RunOptions() if data is None else data
    if not isinstance(data, Mapping):
        raise PinError(f"options={data!r} must be a mapping, for example {{launch: graphs}}")
    for key in data:
        if key not in OPTIONS:
            raise PinError(f"unknown option {key!r}; known: {', '.join(OPTIONS)}")
    given = {key: value for key, value in data.items() if value is not None}
    for key in _SWITCHES:
        if not isinstance(given.get(key, True), bool):
            raise PinError(f"{key}={given[key]!r} must be true or false")
    overlap = given.get("overlap", "")
    if not isinstance(overlap, str):
        if not isinstance(overlap, Sequence | frozenset | set):
            raise PinError(f"overlap={overlap!r} must be a list, for example [tp, pp]")
        given["overlap"] = ",".join(map(str, overlap))
    return read_options(**given)


def option_words(options: RunOptions) -> list[str]:
    """What departs from the defaults, as words of the command line."""
    words: list[str] = []
    for name, default in option_data(RunOptions()).items():
        value, flag = option_data(options)[name], name.replace("_", "-")
        if value == default:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", ",".join(value) if isinstance(value, list) else str(value)]
    return words


def imbalance_of(request: PlanRequest) -> dict[str, Any] | None:
    """What is assumed of uneven routing: `{"value", "what", "source"}`; None for a model without experts."""
    if not any(node.op == "experts" for block in request.graph.blocks.values() for node in block.nodes):
        return None
    shipped = "stated, not fitted: published runs with experts force balance; others: --constants FILE"
    return {
        "value": request.constants.imbalance,
        "what": "rows of the fullest rank's experts over the mean",
        "source": shipped if request.constants_file is None else f"constants of {request.constants_file}",
    }


def option_texts(options: RunOptions) -> list[str]:
    """What departs from the defaults, in a few words each."""
    o = options
    said = [] if o.attention is None else [f"{o.attention} attention"]
    said += [f"{o.launch} launch"] if o.launch is not Launch.ASYNC else []
    said += [f"overlap of {' and '.join(sorted(o.overlap))}"] if o.overlap else []
    said += [f"{o.dispatcher} dispatcher"] if o.dispatcher is not Dispatcher.ALL_TO_ALL else []
    said += [] if o.sequence_parallel else ["no sequence parallelism"]
    said += ["fused experts"] if o.fused_experts else []
    said += ["weights gathered in 8 bits"] if o.narrow_gather else []
    said += ["fused loss"] if o.fused_loss else []
    said += [] if o.overlap_zero else ["ZeRO not overlapped"]
    said += [] if o.overlap_gather or not o.overlap_zero else ["gathers of ZeRO not overlapped"]
    said += ["ZeRO 3 by tensor"] if o.zero_by_tensor else []
    said += [f"documents of {o.document_len} tokens"] if o.document_len is not None else []
    return said


def option_data(options: RunOptions) -> dict[str, Any]:
    """All of them as plain data, which `options_of` reads."""
    o = options
    return {
        "attention": None if o.attention is None else str(o.attention),
        "launch": str(o.launch),
        "overlap": sorted(o.overlap),
        "dispatcher": str(o.dispatcher),
        "sequence_parallel": o.sequence_parallel,
        "fused_experts": o.fused_experts,
        "narrow_gather": o.narrow_gather,
        "fused_loss": o.fused_loss,
        "overlap_zero": o.overlap_zero,
        "document_len": o.document_len,
        "overlap_gather": o.overlap_gather,
        "zero_by_tensor": o.zero_by_tensor,
    }
