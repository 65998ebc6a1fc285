"""The storage that torch.distributed.checkpoint writes and reads: safetensors files and an index, nothing pickled.

torch's own FileSystemWriter pickles its metadata, and its reader unpickles it. A StorageWriter and a StorageReader are
its supported extension points: the planning (who writes which part of which tensor, once) and the resharding at load
remain torch's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from autoplan.runtime.tensor_files import DTYPES, NAMES, NewTensor, TensorFile, write_tensors

CheckpointId = str | os.PathLike[str] | None


@dataclass(frozen=True)
class StoredChunk:
    """The place of a written chunk of a tensor, and the fingerprint of its file."""

    file: str
    entry: str
    file_bytes: int
    file_sha256: str


class FolderWriter(StorageWriter):
    """Writes the chunks of a rank into one file of a folder.

    Args:
        folder: the folder, which all ranks see.
        rank: this rank.
        finish: called on one rank when all have written, with the index of the tensors and the files.
    """

    def __init__(self, folder: Path, rank: int, finish: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
        self.folder = folder
        self.rank = rank
        self._finish = finish

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Do nothing: a writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that this rank sees the folder. Raises OSError."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"this rank does not see {self.folder}; give a folder that all hosts share")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank's plan. Raises OSError."""
        name = f"rank_{self.rank:05d}.safetensors"
        items = {_entry_name(item.index): item for item in plan.items}
        results: list[WriteResult] = []
        if items:
            written = write_tensors(self.folder / name, {e: _new(item, planner) for e, item in items.items()})
            results = [
                WriteResult(
                    item.index,
                    _new(item, planner).num_bytes,
                    StoredChunk(name, entry, written.num_bytes, written.sha256),
                )
                for entry, item in items.items()
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Hand over the index: tensor -> dtype, shape and chunks, and file -> size and digest."""
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors: dict[str, Any] = {}
        for name, about in metadata.state_dict_metadata.items():
            if not isinstance(about, TensorStorageMetadata):
                raise TypeError(f"{name} is not a tensor")
            chunks = [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": stored[MetadataIndex(name, chunk.offsets)].file,
                    "entry": stored[MetadataIndex(name, chunk.offsets)].entry,
                }
                for chunk in about.chunks
            ]
            tensors[name] = {"dtype": NAMES[about.properties.dtype], "shape": list(about.size), "chunks": chunks}
        files = {s.file: {"bytes": s.file_bytes, "sha256": s.file_sha256} for s in stored.values()}
        self._finish(tensors, dict(sorted(files.items())))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return True: the folder is given to the constructor."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Return None: the folder says it all."""
        return None


def _entry_name(index: MetadataIndex) -> str:
    offsets = ",".join(map(str, index.offset or ()))
    return f"{index.fqn}@{offsets}"


def _new(item: WriteItem, planner: SavePlanner) -> NewTensor:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor")

    def values() -> torch.Tensor:
        found = planner.resolve_data(item)
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"{item.index.fqn} is not a tensor")
        return found

    return NewTensor(data.properties.dtype, tuple(data.chunk.sizes), values)


class FolderReader(StorageReader):
    """Reads parts of tensors out of the files of a folder.

    Args:
        folder: the folder.
        tensors: the index that `FolderWriter` handed over.
        copies: further keys of a tensor, for tied parameters with several copies on a rank.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Any], copies: Mapping[str, str]) -> None:
        self.folder = folder
        self._tensors = {**tensors, **{key: tensors[name] for key, name in copies.items()}}
        self._files: dict[str, TensorFile] = {}
        self._places = {
            MetadataIndex(name, torch.Size(chunk["offsets"])): (chunk["file"], chunk["entry"])
            for name, about in self._tensors.items()
            for chunk in about["chunks"]
        }

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Do nothing: a reader serves one checkpoint."""

    def read_metadata(self) -> Metadata:
        """Return the index in torch's form. It takes no arguments, so that torch asks for no other file."""
        return Metadata({name: _metadata(about) for name, about in self._tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the index is given to the constructor."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank needs into its tensors, slice by slice. Raises OSError and TensorFileError."""
        for item in plan.items:
            name, entry = self._places[item.storage_index]
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = TensorFile(self.folder / name)
            ranges = [(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True)]
            target = planner.resolve_tensor(item).detach()
            file.read_into(entry, target, ranges)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return True: the folder is given to the constructor."""
        return True


def _metadata(about: Mapping[str, Any]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in about["chunks"]]
    return TensorStorageMetadata(TensorProperties(DTYPES[about["dtype"]]), torch.Size(about["shape"]), chunks)
