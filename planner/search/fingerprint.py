"""Short hash of a problem for error messages."""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def fingerprint(problem: Any) -> str:
    """Twelve hexadecimal digits, the same for equal problems on every machine."""
    digest = hashlib.sha256()
    _update(digest, problem)
    return digest.hexdigest()[:12]


def _update(digest: Any, value: Any) -> None:
    content = getattr(value, "content_hash", None)
    if isinstance(content, str):
        digest.update(content.encode())
    elif isinstance(value, np.ndarray):
        digest.update(str(value.shape).encode())
        digest.update(np.ascontiguousarray(value, dtype="<f8").tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        digest.update(type(value).__name__.encode())
        for field in fields(value):
            digest.update(field.name.encode())
            _update(digest, getattr(value, field.name))
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _update(digest, item)
    else:
        digest.update(repr(value).encode())
