"""Tensor files in the safetensors format: a JSON header, then bytes.

Unlike pickle, reading executes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from planner.utils.atomic_write import replacing
from planner.utils.input_files import parse_json
from planner.utils.refusal import Refusal

LENGTH = struct.Struct("<Q")
"""Length of the header, in front of it."""
DTYPE_OF_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
NAME_OF_DTYPE = {value: name for name, value in DTYPE_OF_NAME.items()}
METADATA = "__metadata__"
"""Key of the header that is not a tensor."""
MAX_HEADER_BYTES = 100_000_000
ALIGN = 8


class TensorFileError(Refusal):
    """A file with invalid content."""


class TensorEntry(NamedTuple):
    """A tensor in a file: type, shape, first byte and the one after the last."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    cancelled: threading.Event | None = None,
) -> str:
    """Write to a temporary file next to ``path``, sync it, then rename it.

    Returns
    -------
    str
        SHA-256 of the file.

    Raises
    ------
    CancelledError
        ``cancelled`` was set between two tensors.
    """
    header: dict[str, object] = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        shape, kind = list(tensor.shape), NAME_OF_DTYPE[tensor.dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGN)
    digest = hashlib.sha256()
    with replacing(path, sync=True) as file:
        for part in (LENGTH.pack(len(text)), text):
            file.write(part)
            digest.update(part)
        for tensor in tensors.values():
            if cancelled is not None and cancelled.is_set():
                raise CancelledError
            flat = tensor.detach().to("cpu").contiguous().view(-1)
            data = flat.view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
    return digest.hexdigest()


def read_tensors(
    path: Path, sha256: str, wanted: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """Read tensors, verified by SHA-256.

    Returns
    -------
    dict[str, Tensor]
        By name, on the CPU.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            size = file.tell()
    except OSError as error:
        raise TensorFileError(f"{path}: cannot be read ({error.strerror})") from None
    if digest.hexdigest() != sha256:
        raise TensorFileError(
            f"{path}: its {size} bytes are not those that were written; delete this checkpoint, so "
            "that an earlier one is taken"
        )
    entries = read_entries(path).items()
    return {n: read_tensor(path, entry) for n, entry in entries if wanted is None or wanted(n)}


def read_entries(
    path: Path, leave_out: Callable[[str], object] | None = None
) -> dict[str, TensorEntry]:
    """Entries of a file, without reading the tensors."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            first = file.read(LENGTH.size)
            length = LENGTH.unpack(first)[0] if len(first) == LENGTH.size else size
            start = LENGTH.size + length
            if length > MAX_HEADER_BYTES or start > size:
                raise TensorFileError(f"{path}: not a safetensors file, or truncated")
            header = parse_json(file.read(length).decode(), path, error=TensorFileError)
    except OSError as error:
        raise TensorFileError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise TensorFileError(f"{path}: not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise TensorFileError(f"{path}: not a safetensors file: its header is no JSON object")
    entries = {name: entry for name, entry in header.items() if name != METADATA}
    if leave_out is not None:
        entries = {name: entry for name, entry in entries.items() if not leave_out(name)}
    return {name: _tensor_entry(path, name, entry, start, size) for name, entry in entries.items()}


def read_tensor(path: Path, entry: TensorEntry) -> Tensor:
    """Read one tensor."""
    size = entry.end - entry.begin
    if size == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    try:
        data = np.fromfile(path, np.uint8, size, offset=entry.begin)
    except OSError as error:
        raise TensorFileError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) < size:
        raise TensorFileError(f"{path}: truncated: it ends before its last tensor; copy it again")
    return torch.from_numpy(data).view(entry.dtype).view(entry.shape)


def _tensor_entry(path: Path, name: str, entry: Any, start: int, size: int) -> TensorEntry:
    try:
        kind, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
        begin, end = (start + int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise TensorFileError(f"{path}: the entry of {name!r} in its header is invalid") from None
    if kind not in DTYPE_OF_NAME:
        raise TensorFileError(
            f"{path}: {name!r} has type {kind!r}, not one of {', '.join(DTYPE_OF_NAME)}; convert it"
        )
    fits = start <= begin <= end <= size and min(shape, default=0) >= 0
    if not fits or end - begin != math.prod(shape) * DTYPE_OF_NAME[kind].itemsize:
        raise TensorFileError(
            f"{path}: its header places {name!r} where its bytes are not; copy it again"
        )
    return TensorEntry(DTYPE_OF_NAME[kind], shape, begin, end)
