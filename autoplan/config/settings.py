"""Settings of a task beside its plan and its run options: lengths, batch, precision, mode and measured times.

Their records are those of all choices (`autoplan.config.choice`). From them follow the options of the command line, the
names that what-if and capacity vary with their ranges, the keys of files and the checks of values.
"""

from __future__ import annotations

from autoplan.config.choice import Choice, Written
from autoplan.config.parallel import Mode
from autoplan.config.precision import GRADIENTS_16, MOMENTS_16, PRECISIONS, REMAINDERS_16, precision_of
from autoplan.errors import PinError


def _precision(name: str, value: object) -> str | None:
    try:
        precision_of(str(value))
    except PinError as error:
        return str(error)
    return None


def _names(apart: bool) -> str:
    """Return the precisions whose products have a dtype of their own, or the others, in Markdown."""
    return ", ".join(f"`{name}`" for name, found in PRECISIONS.items() if (found.matmul is not None) is apart)


TASK_SETTINGS: tuple[Choice, ...] = (
    Choice(
        "seq_len",
        help="Tokens per sequence, in powers of 1024: 8k is 8,192, 1M is 1,048,576.",
        flags=("--seq-len", "--seq"),
        most=10**9,
        varied="tokens per sequence",
        executed=True,
    ),
    Choice(
        "global_batch_size",
        help="Sequences per step, over all devices; 1k is 1,024.",
        flags=("--global-batch-size", "--gbs"),
        most=10**7,
        varied="sequences per step",
        executed=True,
    ),
    Choice(
        "precision",
        "bf16",
        "bf16, fp16, fp32, fp8, mxfp8, fp4, bf16-autocast and fp16-autocast (torch.autocast of float32 parameters), or "
        "native (the model's own dtypes); suffixes keep more in 16 bits: "
        f"gradients (bf16{GRADIENTS_16}), AdamW's moments ({MOMENTS_16}), and of masters what a bfloat16 parameter "
        f"lacks ({REMAINDERS_16}); -grad32 overrides 16-bit gradients of --like.",
        written=Written.WORD,
        obstacle=_precision,
        about=(
            f"{_names(False)}; {_names(True)} are priced, not executed. Suffixes: `{GRADIENTS_16}` sums gradients in "
            f"16 bits; `{MOMENTS_16}` (AdamW's moments) and `{REMAINDERS_16}` (of a float32 master only the 16 bits "
            "that its bfloat16 parameter lacks) are priced, not executed"
        ),
        varied="one of " + ", ".join(PRECISIONS),
        executed=True,  # as far as a rule says (`autoplan.program.legality`)
    ),
    Choice(
        "mode",
        Mode.EAGER,
        "How the program runs: eager, fused or compiled; default: that of --like, else eager.",
        written=Written.WORD,
        words=Mode,
        left_out=True,
        about="Kernels: `eager`, `fused` (as Megatron and Transformer Engine; priced, not executed) or `compiled`",
        varied="one of " + ", ".join(Mode),
        executed=True,  # as far as a rule says
    ),
    Choice(
        "target_len",
        help="Tokens per target sequence of an encoder-decoder, read as --seq-len; default: as many.",
        may_be_open=True,
        executed=True,
    ),
    Choice(
        "profile",
        help="Measured times: the name or file of a profile.",
        written=Written.WORD,
        may_be_open=True,
        executed=True,
    ),
)
# The settings whose value a plan depends on, and that a sweep may vary
VARIED_SETTINGS: tuple[str, ...] = tuple(record.name for record in TASK_SETTINGS if record.varied)
_BY_NAME = {record.name: record for record in TASK_SETTINGS}


def setting(name: str) -> Choice:
    """Return the record of a setting."""
    return _BY_NAME[name]


def check_setting(name: str, value: object) -> None:
    """Raise PinError for a value that no model and cluster makes legal."""
    reason = setting(name).reason(value)
    if reason is not None:
        raise PinError(reason)
