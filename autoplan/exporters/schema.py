"""The fields of targets as their sources have them: profiles/targets/NAME.json, with source and version.

What is written is checked against them, and what a file leaves out has their defaults.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from typing import Any

from autoplan.errors import PinError
from autoplan.stacks.records import version_of, year_of

_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}

# Names of any framework's files that change neither time nor memory, or only what the model itself says: sections that
# they stand in, and patterns of the last part of their path. They are of names that are no fields of a target.
_OTHER_SECTIONS = frozenset(
    "checkpoint checkpoints ckpt clearml comm comet data data_stages dataloader dataset dataset_mixer datasets "
    "dist_env eval exp_manager experiment export general generation inference init_method job lighteval logger "
    "logging lr_scheduler metrics metrics_logging mlflow monitoring nsys_profile profiler profiling rng run "
    "s3_upload sched scheduler slurm swanlab tensorboard test_ds tokenizer train_ds validation "
    "validation_dataloader validation_dataset validation_ds wandb".split()
)
_OTHER_NAMES = tuple(
    # the model's sizes and functions
    "*hidden_size num_*heads num_layers *coder_num_layers *hidden_layers num_query_groups group_query_attention "
    "kv_channels head_dim *intermediate_size *ffn_size *ffn_hidden_size *max_position_embeddings "
    "position_embedding* rope_* *rotary* *rope swiglu squared_relu *activation hidden_act normalization *norm_eps* "
    "*norm_epsilon layernorm* *layernorm *layernorm_1p disable_bias_linear *bias *init_std *init_method* "
    "initializer_range *tie*embeddings* share_embeddings* q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
    "v_head_dim mscale* mtp_loss* *_dropout *dropout_rate *vocab* *token_id "
    # the optimizer's numbers, the length of the run, seeds
    "lr lr_* *_lr *learning_rate* *lr_decay* *warmup* *weight_decay* *adam_* adam *betas beta1 beta2 eps clip_grad* "
    "*grad_norm* gradient_clip* train_iters train_samples train_tokens train_steps *epoch* max_steps steps *seed* "
    "exit_* max_time max_duration *loss_scale* *hysteresis *scale_window override_opt_* consumed_* reset_iteration "
    # data, logs, checkpoints, evaluation
    "*data_path* *dataset* *data_args* data_path* data_impl data_cache* data_root* data_dir* *_data split splits* "
    "*tokenizer* merge_file *workers* *num_proc* dataloader_* shuffle* *shuffle *template *_file *_dir *_path log "
    "log_* *_log *_logs logs *logging* *logger* *wandb* *tensorboard* *metric* *profil* *_name name version run_* "
    "*description* *comment* project project_* *_project *project_name *eval* *valid* *test_* save* *_save* *ckpt* "
    "load load_* *_load no_save* no_load* *checkpoint_interval *checkpoint_dir *checkpointing_steps "
    "*checkpoint_format finetune *resume* *push_to_hub* hub_* *restore* *trust_remote* *timeout* *timing* *timers* "
    "master_* *_port *_host* *verbose* *_url *token_ids eod_* reset_position_ids reset_attention_mask manual_gc* "
    "gc_* *nan* use_checkpoint_args dist_ckpt* mock_* make_vocab* seq_length_dec report_to enable_goodput* "
    "monitor_* cache_dir *stopping*".split()
)


@dataclass(frozen=True)
class TargetField:
    """One field of a target.

    Attributes:
        kinds: names of its types; empty for any.
        whole: True if a number with a fraction of zero (5e8) counts as an integer.
        values: the values that it takes; empty for any.
        default: what it is if nothing is said; None if that follows from other fields.
        since, until: years between which it exists.
    """

    kinds: tuple[str, ...] = ()
    values: tuple[Any, ...] = field(default=(), hash=False)
    default: Any = None
    since: float = 0.0
    until: float = 9999.0
    whole: bool = False

    def reason(self, value: Any) -> str | None:
        """Return why a value is not one of the field, or None."""
        if value is None:
            return None
        if "float" in self.kinds and isinstance(value, str) and _is_number(value):
            return None  # 1e-5, which YAML 1.1 takes for a text
        if self.whole and "int" in self.kinds and isinstance(value, float) and value.is_integer():
            value = int(value)
        kinds = tuple(kind for name in self.kinds for kind in _KINDS[name])
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            return f"must be of type {' or '.join(self.kinds)}"
        if self.values and not all(each in self.values for each in (value if isinstance(value, list) else [value])):
            return f"must be one of {', '.join(map(str, self.values))}"
        return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Schema:
    """The fields of a target.

    Attributes:
        source: where they were read.
        releases: release -> month YY.MM.
        closed: sections all of whose fields are known, so that another one is an error.
        open: paths below which anything may stand.
        idle: patterns of fields that change neither time nor memory beyond what the model itself says.
    """

    name: str
    source: str
    releases: Mapping[str, str] = field(hash=False)
    entries: Mapping[str, TargetField] = field(hash=False, repr=False)
    closed: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @staticmethod
    @lru_cache(maxsize=32)
    def load(name: str) -> Schema:
        """Return the schema of the target with this name."""
        data = json.loads(files("autoplan.profiles").joinpath("targets", f"{name}.json").read_text(encoding="utf-8"))
        entries = {path: _entry(path, each, bool(data.get("whole_floats"))) for path, each in data["fields"].items()}
        closed, open_, idle = (tuple(data[name]) for name in ("closed", "open", "idle"))
        return Schema(name, data["source"], data["releases"], entries, closed, open_, idle)

    def default(self, path: str) -> Any:
        """Return the default of a field; None if it has none."""
        return self.entries[path].default if path in self.entries else None

    def is_idle(self, path: str, value: Any) -> bool:
        """Return True if a value at a path changes neither time nor memory: one of those fields, or the default."""
        entry = self.entries.get(path)
        if entry is None or any(fnmatchcase(path, pattern) for pattern in self.idle):
            return True
        return value in ("auto", None, []) or (entry.default is not None and value == entry.default)

    def is_foreign(self, path: str) -> bool:
        """Return True for a path that is no field, and of which nobody has said that it changes nothing."""
        *sections, name = path.split(".")
        others = any(fnmatchcase(name.lower(), each) for each in _OTHER_NAMES) or _OTHER_SECTIONS.intersection(sections)
        idle = others or any(fnmatchcase(path, each) for each in self.idle)
        return not (idle or self.knows(path) or self.is_section(path))

    def is_section(self, path: str) -> bool:
        """Return True for a path that is no field, but has fields below it."""
        return path not in self.entries and any(name.startswith(f"{path}.") for name in self.entries)

    def knows(self, path: str) -> bool:
        """Return True for a field of the target, of any version."""
        return path in self.entries or any(path == each or path.startswith(f"{each}.") for each in self.open)

    def exists(self, path: str, year: float) -> bool:
        """Return True if a field exists in a year."""
        return path in self.entries and self.entries[path].since <= year < self.entries[path].until

    def faults(self, values: Mapping[str, Any], year: float, every: bool = False) -> list[str]:
        """Return the faults of values that the target would not take, with the nearest that it takes.

        Args:
            every: True: a field that is not known is a fault anywhere, not only in a closed section.
        """
        found = (self._fault(path, value, year, every) for path, value in values.items())
        return [text for text in found if text is not None]

    def _fault(self, path: str, value: Any, year: float, every: bool) -> str | None:
        entry = self.entries.get(path)
        if entry is None:
            inside = path.rpartition(".")[0] in self.closed
            if self.knows(path) or not (every or inside):
                return None
            return f"{path} is not a field of {self.name}; {_nearest(path, self.entries)}"
        if not entry.since <= year < entry.until:
            when = f"since {version_of(entry.since)}" if year < entry.since else f"before {version_of(entry.until)}"
            return f"{path} is a field of {self.name} only {when}"
        reason = entry.reason(value)
        return None if reason is None else f"{path}={value!r} {reason}"

    def check(self, values: Mapping[str, Any], year: float) -> None:
        """Raise PinError if the target would not take these values."""
        found = self.faults(values, year, every=True)
        if found:
            raise PinError("; ".join(found))


def _nearest(path: str, known: Mapping[str, TargetField]) -> str:
    """Return a hint at the nearest field, or at where fields of such names are."""
    near = difflib.get_close_matches(path, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else "nothing near is; the fields: profiles/targets"


_KEYS = ("type", "values", "default", "since", "until")


def _entry(path: str, data: Mapping[str, Any], whole: bool) -> TargetField:
    unknown = [key for key in data if key not in _KEYS]
    if unknown:
        raise ValueError(f"{path} has {', '.join(unknown)}; what is known of a field: {', '.join(_KEYS)}")
    kinds = data.get("type", ())
    return TargetField(
        (kinds,) if isinstance(kinds, str) else tuple(kinds),
        tuple(data.get("values", ())),
        data.get("default"),
        year_of(data["since"]) if "since" in data else 0.0,
        year_of(data["until"]) if "until" in data else 9999.0,
        whole,
    )
