"""Tensors in a file, as safetensors has them: a JSON header of names, types, places, then bytes.

Read without running anything that the file says, unlike pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LENGTH = struct.Struct("<Q")
"""Of the header, in front of it."""
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
NAMES = {value: name for name, value in TYPES.items()}
MOST_HEADER_BYTES = 100_000_000
ALIGN = 8


class TensorFileError(ValueError):
    """A file that does not hold what it should."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write to a temporary file beside ``path``, onto the disk, then rename it into place.

    Parameters
    ----------
    path
        Of the file.
    tensors
        By name, on any device.

    Returns
    -------
    str
        SHA-256 of the file.

    Raises
    ------
    OSError
        There is no room, or no permission; nothing is left then.
    """
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        shape, kind = list(tensor.shape), NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGN)
    digest = hashlib.sha256()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            for part in (LENGTH.pack(len(text)), text):
                file.write(part)
                digest.update(part)
            for tensor in tensors.values():
                flat = tensor.detach().to("cpu").contiguous().view(-1)
                data = flat.view(torch.uint8).numpy().data
                file.write(data)
                digest.update(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return digest.hexdigest()


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    """What `write_tensors` wrote.

    Parameters
    ----------
    path
        Of the file.
    sha256
        Of what was written.

    Returns
    -------
    dict[str, Tensor]
        By name, on the CPU.

    Raises
    ------
    TensorFileError
        The file is not what was written.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise TensorFileError(f"{path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(data.data).hexdigest() != sha256:
        raise TensorFileError(
            f"{path}: its {len(data)} bytes are not those that were written; delete this "
            "checkpoint, so that an earlier one is taken"
        )
    (length,) = LENGTH.unpack(data[: LENGTH.size].tobytes())
    if length > MOST_HEADER_BYTES:
        raise TensorFileError(f"{path}: its header claims {length} bytes; it is no such file")
    start = LENGTH.size + length
    header = json.loads(data[LENGTH.size : start].tobytes())
    bytes_of = torch.from_numpy(data)
    found = {}
    for name, told in header.items():
        begin, end = told["data_offsets"]
        # a copy of its own, aligned as its type wants it
        part = bytes_of[start + begin : start + end].clone()
        found[name] = part.view(TYPES[told["dtype"]]).view(told["shape"])
    return found
