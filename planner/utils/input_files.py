"""Reads user files: limited in size, with errors of one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.utils.validate import short_repr

MAX_BYTES = 50_000_000
"""Largest size of a file. A plan for a thousand devices has two million bytes."""
Error = type[ValueError]
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_text(path: str | Path, *, error: Error = ValueError, most_bytes: int = MAX_BYTES) -> str:
    """Text of a file without byte order mark."""
    try:
        with Path(path).open("rb") as file:
            # limit reading of endless files
            data = file.read(most_bytes + 1)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror}); check the path") from None
    except (ValueError, TypeError):
        raise error(f"{short_repr(path)} is no path; give one") from None
    if len(data) > most_bytes:
        raise error(f"{path}: is larger than {most_bytes / 1e6:g} MB; give a smaller file")
    if is_utf_16(data):
        raise error(f"{path}: is not UTF-8 text but UTF-16; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(f"{path}: is not UTF-8 text (byte {cause.start}); save it as UTF-8") from None


def is_utf_16(data: bytes) -> bool:
    """Whether bytes are UTF-16 text: by byte order mark, or by zero bytes."""
    return data.startswith(UTF_16_MARKS) or 4 <= len(data) <= 4 * data.count(0)


def read_json(path: str | Path, *, error: Error = ValueError, most_bytes: int = MAX_BYTES) -> Any:
    """Content of a JSON file."""
    return parse_json(read_text(path, error=error, most_bytes=most_bytes), path, error=error)


class _RepeatedKeyError(ValueError):
    """A key that one JSON object has twice."""


def parse_json(
    text: str,
    where: str | Path,
    *,
    error: Error = ValueError,
    second: Mapping[str, str] | None = None,
) -> Any:
    """Parse JSON text; a key that occurs twice in an object is refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) == len(pairs):
            return fields
        fields = {}
        for key, value in pairs:
            name = key if key not in fields or second is None else second.get(key, key)
            if name in fields:
                times = "twice" if name == key else "more than twice"
                raise _RepeatedKeyError(f"{short_repr(key)} {times}")
            fields[name] = value
        return fields

    try:
        return json.loads(text, object_pairs_hook=unique)
    except _RepeatedKeyError as key:
        raise error(f"{where}: an object has the key {key}; keep one of them") from None
    except (ValueError, RecursionError) as cause:
        # also refuses huge integers and deep nesting
        raise error(f"{where}: is not JSON ({cause}); correct the file") from None
