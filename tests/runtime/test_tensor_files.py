"""Files of tensors: as the safetensors library writes and reads them, slice by slice, and never beyond the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoplan.runtime import tensor_files
from autoplan.runtime.tensor_files import DTYPES, NewTensor, TensorFile, TensorFileError, write_tensors


def new(tensor: torch.Tensor) -> NewTensor:
    return NewTensor(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def some_tensors() -> dict[str, torch.Tensor]:
    made = {str(d): torch.arange(24).to(torch.uint8).view(d).clone() for d in DTYPES.values() if d != torch.bool}
    made |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "flags": torch.tensor([True, False])}
    return made | {"turned": torch.arange(12.0).reshape(3, 4).t()}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = some_tensors()
    written = write_tensors(tmp_path / "ours", {n: new(t) for n, t in tensors.items()}, {"format": "pt"})
    assert written.num_bytes == (tmp_path / "ours").stat().st_size
    theirs = safetensors.load_file(tmp_path / "ours")
    safetensors.save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "theirs")
    file = TensorFile(tmp_path / "theirs")
    assert TensorFile(tmp_path / "ours").metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        for found in (theirs[name], file.read(name)):
            assert found.dtype == tensor.dtype and found.shape == tensor.shape and bits(found) == bits(tensor), name


@pytest.mark.parametrize("block_bytes", [1, 40, 1 << 20])
def test_slices_are_those_of_the_tensor(block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", block_bytes)
    cube, line = torch.arange(120.0).reshape(4, 5, 6), torch.arange(7)
    write_tensors(tmp_path / "f", {"cube": new(cube), "line": new(line)})
    file = TensorFile(tmp_path / "f")
    assert torch.equal(file.read("cube"), cube)
    assert torch.equal(file.read("cube", [(1, 3), (2, 5), (0, 4)]), cube[1:3, 2:5, :4])
    assert torch.equal(file.read("line", [(3, 7)]), line[3:])
    out = torch.zeros(6, 5, dtype=torch.float64)
    file.read_into("cube", out.t()[None], [(3, 4), (0, 5), (0, 6)])  # strided, of another dtype
    assert torch.equal(out, cube[3].t().double())
    with pytest.raises(TensorFileError, match="is not inside it"):
        file.read("line", [(3, 8)])


def test_a_file_that_is_no_such_file_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "f", {"x": new(torch.arange(5.0))})
    data = (tmp_path / "f").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def refused(content: bytes, text: str) -> None:
        (tmp_path / "g").write_bytes(content)
        with pytest.raises(TensorFileError, match=text):
            TensorFile(tmp_path / "g")

    def with_header(**changes: object) -> bytes:
        text = json.dumps({"x": {**header["x"], **changes}}).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    refused(data[:4], "too few for a header")
    refused((1 << 60).to_bytes(8, "little") + data[8:], "too few for a header")
    refused(data[:-1], "cannot lie at")
    refused(data + b"x", "its header describes")
    refused(b"\x08" + bytes(7) + b"no json." + bytes(20), "the header cannot be read")
    refused(with_header(shape=[1 << 40]), "cannot lie at")
    refused(with_header(data_offsets=[-4, 16]), "cannot lie at")
    refused(with_header(shape=[-5]), "cannot lie at")
    refused(with_header(dtype="F31"), "F31")
    with pytest.raises(TensorFileError, match="cannot be stored"):
        write_tensors(tmp_path / "h", {"x": new(torch.zeros(1, dtype=torch.complex128))})
    assert not (tmp_path / "h").exists()
