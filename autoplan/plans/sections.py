"""The sections of a plan file, with the shape of everything that they hold.

The reader checks by them (`autoplan.plans.document`), and docs/plan.schema.json is written from them.
`autoplan.report.data` says what the values mean.
"""

from __future__ import annotations

from typing import Any

from autoplan.config.choice import Choice, Written, choices_of
from autoplan.config.choices import CHOICES
from autoplan.config.parallel import Mode, RunOptions
from autoplan.config.planning import TOLERANCES
from autoplan.plans.shapes import (
    ANY,
    NOT_NEGATIVE,
    NULL,
    NUMBER,
    POSITIVE,
    SWITCH,
    TEXT,
    Either,
    Fields,
    JsonShape,
    ListOf,
    NamesTo,
    Number,
    OneOf,
    Text,
    TupleOf,
    json_schema,
    or_null,
)
from autoplan.program.choice_kinds import ChoiceKind
from autoplan.schedules.schedule import SCHEDULES

SCHEMA_VERSION = 1
READ_SCHEMA_VERSIONS = (1,)

# Choices whose values are of more kinds than their records say
_SPECIAL: dict[str, JsonShape] = {
    "schedule": OneOf(tuple(SCHEDULES)),
    "recompute": Either((TEXT, NamesTo(TEXT), ListOf(NOT_NEGATIVE))),
    "context_method": Either((TEXT, NamesTo(TEXT), NULL)),
    "offload": Either((TEXT, ListOf(TEXT))),
    "state_slack": Number(least=1),
}


def _of_choice(record: Choice) -> JsonShape:
    """Return the shape of the values of a choice of a plan or of a run, as JSON data."""
    if record.name in _SPECIAL:
        return _SPECIAL[record.name]
    if record.written is Written.COUNT:
        shape: JsonShape = Number(whole=True, least=int(record.least), most=int(record.most))
    elif record.written is Written.WORDS:
        shape = ListOf(OneOf(tuple(map(str, record.words))))
    elif record.written is Written.WORD:
        word = OneOf(tuple(map(str, record.words)))
        shape = Either((word, SWITCH)) if record.former else word
    else:
        shape = {Written.SWITCH: SWITCH, Written.NUMBER: NUMBER, Written.LIST: ListOf(NOT_NEGATIVE)}[record.written]
    return or_null(shape) if record.may_be_open else shape


def _of_option(record: Choice) -> JsonShape:
    shape = _of_choice(record)
    return or_null(shape) if record.default is None else shape


_QUANTITY = Fields(
    {**dict.fromkeys(("low", "mid", "high"), NUMBER), "evidence": OneOf(("exact", "measured", "fitted", "assumed"))},
    ("low", "mid", "high", "evidence"),
    "quantity",
)
_QUANTITIES = NamesTo(_QUANTITY)
_NOTES = ListOf(TEXT)
_PLAN = Fields({record.name: _of_choice(record) for record in CHOICES}, (), "plan", "choice")


def _all(known: dict[str, JsonShape], name: str = "", optional: tuple[str, ...] = ()) -> Fields:
    """Return an object that has all of its names but the optional ones."""
    return Fields(known, tuple(n for n in known if n not in optional), name)


_STAGE = _all(
    {
        "num_layers": NOT_NEGATIVE,
        "num_recomputed": NOT_NEGATIVE,
        "in_flight": NOT_NEGATIVE,
        "fullest": TEXT,
        "forward_s": _QUANTITY,
        "backward_s": _QUANTITY,
        "memory_bytes": _QUANTITY,
    },
)
_ASSUMPTION = _all({"value": or_null(_QUANTITY), "given": SWITCH, "what": TEXT, "source": TEXT}, "assumption")
_GOODPUT = _all(
    dict.fromkeys(("share", "mtbf_s", "checkpoint_s", "restart_s", "checkpoint_interval_s"), _QUANTITY), "goodput"
)
_MAY_BE_UNKNOWN = ("usd", "kwh", "usd_energy", "days_with_failures", "usd_with_failures", "kwh_with_failures")
_RUN = _all(
    {
        "tokens": NUMBER,
        "days": _QUANTITY,
        **dict.fromkeys(_MAY_BE_UNKNOWN, or_null(_QUANTITY)),
        "num_failures": or_null(NUMBER),
        "goodput": or_null(_GOODPUT),
        "critical_batch_tokens": or_null(NUMBER),
        "critical_batch_source": TEXT,
        "notes": _NOTES,
        "assumptions": NamesTo(_ASSUMPTION),
    },
    "run",
)
_ESTIMATE = _all(
    {
        "step_time_s": _QUANTITY,
        **dict.fromkeys(("tokens_per_s", "tokens_per_s_per_device", "mfu", "mfu_causal"), NUMBER),
        "fits": SWITCH,
        "memory_capacity_bytes": NUMBER,
        "memory_bytes": ListOf(_QUANTITIES),
        "host_memory_bytes": ListOf(_QUANTITIES),
        "host_memory_capacity_bytes": or_null(NUMBER),
        "stages": ListOf(_STAGE),
        "breakdown_s": _QUANTITIES,
        "run": or_null(_RUN),
    },
    "estimate",
    ("run",),
)
_LEVEL = _all({"name": TEXT, "size": POSITIVE, "bytes_per_s": NUMBER, "latency_s": NUMBER, "source": TEXT})
_CLUSTER = Fields(
    {
        "name": TEXT,
        **dict.fromkeys(("num_nodes", "devices_per_node", "num_devices"), POSITIVE),
        "idle_devices": NOT_NEGATIVE,
        "device": TEXT,
        "memory_bytes": NUMBER,
        "levels": ListOf(_LEVEL),
        "price": or_null(_all({"usd_per_device_hour": NUMBER, "source": TEXT, "as_of": TEXT})),
    }
)
_MAYBE_TEXT = or_null(TEXT)
_REQUEST = Fields(
    {
        "seq_len": POSITIVE,
        "target_len": or_null(POSITIVE),
        "global_batch_size": POSITIVE,
        "pins": NamesTo(),
        "precision": TEXT,
        **{record.name: or_null(NUMBER) for record in TOLERANCES},
        "mode": OneOf(tuple(map(str, Mode))),
        "like": _MAYBE_TEXT,
        **{record.name: _of_option(record) for record in choices_of(RunOptions)},
        **dict.fromkeys(("profile", "constants", "adapters"), _MAYBE_TEXT),
        "imbalance": or_null(_all({"value": NUMBER, "what": TEXT, "source": TEXT})),
    }
)
# Arguments of a command as they were typed; an option may be text or value
_ASKED = Fields(
    {
        **dict.fromkeys(("model", "cluster", "seq_len", "global_batch_size"), TEXT),
        **dict.fromkeys(("precision", "mode", "like", "profile", "constants", "target_len"), _MAYBE_TEXT),
        **dict.fromkeys(("adapters", "tokens"), _MAYBE_TEXT),
        "assume": or_null(ListOf(TEXT)),
        "pin": Either((ListOf(TEXT), NamesTo(), NULL)),
        **{record.name: or_null(NUMBER) for record in TOLERANCES},
        "runnable": or_null(SWITCH),
        **{record.name: ANY for record in choices_of(RunOptions)},
    }
)
_MADE_FOR = Fields(
    {
        "autoplan": TEXT,
        "parameters": NOT_NEGATIVE,
        "graph": TEXT,
        "cluster": TEXT,
        "cluster_figures": TEXT,
        "profile": _MAYBE_TEXT,
    }
)
_CERTIFICATE = Fields(
    {
        **dict.fromkeys(("considered", "illegal", "too_big", "bounded_out", "solved", "open"), NOT_NEGATIVE),
        **dict.fromkeys(("gap", "intra_gap", "solve_time_s"), NUMBER),
        "restrictions": _NOTES,
        "status": TEXT,
        **dict.fromkeys(("illegal_by_rule", "too_big_by_term"), NamesTo(NOT_NEGATIVE)),
        "by_phase_s": NamesTo(NUMBER),
        "prices": TEXT,
    }
)
_LAYOUT_NAME = Text(
    f"(({'|'.join(map(str, ChoiceKind))}) )?[^/]+/.+",
    f"BLOCK/NAME, with {', '.join(f'{str(kind)!r}' for kind in ChoiceKind)} or nothing before it",
)
_PROGRAM = Fields(
    {
        "axes": ListOf(TupleOf((TEXT, POSITIVE))),
        "stages": ListOf(ListOf(TEXT)),
        "recompute": NamesTo(TEXT),
        "layout": NamesTo(TEXT, _LAYOUT_NAME),
        "intra_cost_s": NUMBER,
        "intra_bound_s": NUMBER,
        "precision": TEXT,
        "compiled": SWITCH,
        "notes": _NOTES,
        "capture": TEXT,
    }
)
_OTHER = Fields({"priced_not_executed": _NOTES, "plan": _PLAN, "estimate": _ESTIMATE}, ("plan", "estimate"))
DOCUMENT = Fields(
    {
        "schema": Number(whole=True, least=min(READ_SCHEMA_VERSIONS), most=max(READ_SCHEMA_VERSIONS)),
        "status": TEXT,
        "command": TEXT,
        "model": Fields({"name": TEXT, "num_params": NOT_NEGATIVE, "num_layers": NOT_NEGATIVE, "notes": _NOTES}),
        "cluster": _CLUSTER,
        "request": _REQUEST,
        "asked": _ASKED,
        "made_for": _MADE_FOR,
        "priced_not_executed": _NOTES,
        "plan": _PLAN,
        "estimate": _ESTIMATE,
        "alternatives": ListOf(_OTHER),
        "equals": ListOf(_all({"plan": _PLAN, "step_time_s": NUMBER})),
        "certificate": _CERTIFICATE,
        "program": _PROGRAM,
        "graph": Text("[A-Za-z0-9+/]+=*", "a graph in base64"),
    },
    ("schema", "command", "plan"),
    what="section",
)
SECTIONS, PROGRAM = tuple(DOCUMENT.known), tuple(_PROGRAM.known)


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema of a plan file."""
    return json_schema(DOCUMENT, f"A plan file of autoplan, schema {SCHEMA_VERSION}")
