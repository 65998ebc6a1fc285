"""Folders of checkpoints: one per step, complete or not there.

    FOLDER/step_0000000020/            a checkpoint
        rank_00000.safetensors, ...    tensors, one file per rank that wrote any
        checkpoint.json                what is in them, everything but tensors, size and digest of every file
        complete.json                  the digest of checkpoint.json and the checkpoint's number, written last
    FOLDER/.step_0000000030.writing/   one that is being written, or was when its job died

Checkpoints are numbered in the order in which they were written: the newest is the last one, whatever its step. (A
training that went back to step 10 and saved step 12 goes on from there, although step 30 was saved before.)

A checkpoint is written under the hidden name, and gets its own when it is complete and on the disk. Digests (SHA-256)
find damage: truncated, missing and changed files. They are not a signature; but nothing in a checkpoint is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autoplan.files import digest_of, remove_folder, write_pieces

VERSION = 1
MANIFEST, MARKER = "checkpoint.json", "complete.json"
_NAME = re.compile(r"step_(\d{10,})")
_FILE = re.compile(r"[A-Za-z0-9_]+\.safetensors")


class Damaged(ValueError):
    """A checkpoint that cannot be used; the text says what is wrong with which file."""


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return root / f"step_{step:010d}"


def writing_folder(root: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of a step is written."""
    return root / f".{folder_of(root, step).name}.writing"


def steps_in(root: Path) -> list[int]:
    """Return the steps of all checkpoints that were written completely, the newest first.

    One whose number cannot be read counts as the newest: it is damaged, and the caller says if an older one will do.
    """
    numbered = [(_number(path), int(match[1])) for match, path in _complete(root)]
    return [step for _, step in sorted(numbered, reverse=True)]


def incomplete_in(root: Path) -> list[int]:
    """Return the steps of the folders that have the name of a checkpoint and do not say that they are complete.

    No job leaves one behind, however it ends: a checkpoint gets its name when it is complete.
    """
    found = [_NAME.fullmatch(path.name) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return sorted({int(match[1]) for match in found if match} - set(steps_in(root)))


_FOREIGN = re.compile(r"^checkpoint-\d+$|\.(safetensors|distcp|ckpt|pth?|bin)$")


def misplaced(root: Path) -> str | None:
    """Return why `root` cannot be a folder of checkpoints: it is a file, or one checkpoint; None if it can be."""
    if root.is_file():
        return f"{root} is a file; give the folder of all checkpoints"
    match = _NAME.fullmatch(root.name)
    if match is None or not (root / MARKER).is_file():
        return None
    return f"{root} is one checkpoint; give the folder of all, {root.parent}, with step={int(match[1])}"


def foreign_in(root: Path) -> list[str]:
    """Return names in `root` that other libraries give to weights and checkpoints."""
    found = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    return [name for name in found if _FOREIGN.search(name)]


def _complete(root: Path) -> list[tuple[re.Match[str], Path]]:
    found = ((_NAME.fullmatch(path.name), path) for path in root.iterdir()) if root.is_dir() else ()
    return [(match, path) for match, path in found if match and (path / MARKER).is_file()]


def _number(folder: Path) -> float:
    """Return the number of a checkpoint; 0 of one that was written before there were numbers; else infinity."""
    try:
        return int(json.loads((folder / MARKER).read_bytes()).get("number", 0))
    except (OSError, ValueError, TypeError, AttributeError):
        return math.inf


def recover(root: Path) -> None:
    """Give checkpoints their names back whose replacement was never named. Raises OSError."""
    for path in list(root.glob(".step_*.old")) if root.is_dir() else ():
        final = path.with_name(path.name[1 : -len(".old")])
        if _NAME.fullmatch(final.name) and (path / MARKER).is_file() and not final.exists():
            path.rename(final)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write what a checkpoint holds, and then that it is complete, after all others in its folder. Raises OSError."""
    written = write_pieces(folder / MANIFEST, [json.dumps({"version": VERSION, **manifest}).encode()])
    numbers = (_number(path) for _, path in _complete(folder.parent))
    number = 1 + max((n for n in numbers if math.isfinite(n)), default=0)
    marker = {"number": number, "bytes": written.num_bytes, "sha256": written.sha256}
    write_pieces(folder / MARKER, [json.dumps(marker).encode()])


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what `write_manifest` wrote.

    Raises:
        Damaged: a file is missing, changed, or of another version.
    """
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        text = (folder / MANIFEST).read_bytes()
        if hashlib.sha256(text).hexdigest() != marker["sha256"]:
            raise Damaged(f"{MANIFEST} is not the one that was written ({len(text)} of {marker['bytes']} bytes)")
        manifest: dict[str, Any] = json.loads(text)
        version = manifest["version"]
        files = manifest["files"]
    except OSError as exc:
        raise Damaged(f"{Path(exc.filename or folder).name} cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise exc if isinstance(exc, Damaged) else Damaged(f"{MARKER} or {MANIFEST} has another form: {exc!r}") from exc
    if version != VERSION:
        raise Damaged(f"it has version {version}; this autoplan reads version {VERSION}")
    for name in files:
        if not _FILE.fullmatch(name):
            raise Damaged(f"{MANIFEST} names a file {name!r}")
    return manifest


def damage_of(folder: Path, files: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> str | None:
    """Read the files `names` whole and return the first damage; None if all are as they were written."""
    for name in names:
        try:
            found = digest_of(folder / name)
        except OSError as exc:
            return f"{name} cannot be read: {exc.strerror}"
        if found.num_bytes != files[name]["bytes"]:
            return f"{name} has {found.num_bytes} bytes; {files[name]['bytes']} were written"
        if found.sha256 != files[name]["sha256"]:
            return f"{name} was changed: its SHA-256 is not that of the written file"
    return None


def older_than(root: Path, step: int) -> str:
    """Return a clause that offers the newest usable checkpoint of those written before that of `step`."""
    steps = steps_in(root)
    for other in steps[steps.index(step) + 1 :] if step in steps else steps:
        try:
            read_manifest(folder_of(root, other))
        except Damaged:
            continue
        return f"the checkpoint of step {other} is complete: load it with step={other}, or with older=True"
    return "there is no older checkpoint"


def remove_old(root: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints, and what jobs that died left behind. Raises OSError.

    A checkpoint whose number cannot be read is left alone: it takes the place of no other one.
    """
    steps = [step for step in steps_in(root) if math.isfinite(_number(folder_of(root, step)))]
    for step in steps[keep:] if keep is not None else ():
        remove_folder(folder_of(root, step))
    for path in root.iterdir():
        if path.name.startswith(".step_") and path.suffix in (".writing", ".old", ".gone"):
            remove_folder(path)
