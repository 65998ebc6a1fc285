"""Programs of training scripts that do something else than steps of language modelling, known by their names.

A script that generates or merges states degrees as one that trains does. Training on pairs of answers or with rewards
has more than a forward and a backward of one model in a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autoplan.exporters.record import Recognised

_NOTHING = "trains nothing"
# Words of the names of programs (open_instruct/dpo.py, tools/run_text_generation_server.py) -> what they do
_WORDS: Mapping[str, str] = {
    **dict.fromkeys("dpo kto orpo cpo simpo".split(), "compares pairs of answers, most often with a second model"),
    **dict.fromkeys("grpo ppo rloo dapo rlhf".split(), "generates answers and rates them"),
    "reward": "trains a reward model on pairs of answers",
    **dict.fromkeys("generate generation server merge convert converter inference quantize ptq".split(), _NOTHING),
}
_OF_MEGATRON = re.compile(r"(^|/)tasks/main\.py$")  # fine-tuning on GLUE, retrievers, and evaluation
_CONVERTS = re.compile(r"(hf|mcore|mg|megatron)_?(2|to)_?(hf|mcore|mg|megatron)")  # hf2mcore_70b, deepseek_hf_to_mg
_TRAINS = re.compile("train|tune")  # a program with such a word in its name trains, whatever else is in it


def refuse_other_programs(programs: Sequence[str], where: str) -> None:
    """Raise Recognised if none of the programs that a script starts trains a language model."""
    found = [_does(program) for program in programs]
    if found and all(found):
        raise Recognised(
            f"{where} starts {programs[0]}, which {found[0]}, and only steps of language modelling are priced; "
            "nearest: the script that trains, or this one's arguments without the command"
        )


def _does(program: str) -> str | None:
    """Return what a program does instead of steps of language modelling; None if nothing is known against it."""
    if _OF_MEGATRON.search(program):
        return "trains and evaluates other heads"
    name = program.rpartition("/")[2].removesuffix(".py").rpartition(".")[2]
    words = re.split(r"[_\-\d]+", name.lower())
    found = next((does for word in words if (does := _WORDS.get(word)) is not None), None)
    found = found or (_NOTHING if _CONVERTS.search(name) else None)
    return None if found == _NOTHING and _TRAINS.search(name) else found
