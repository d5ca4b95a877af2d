"""External files are read up to a size limit, or rejected in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner as pl
from planner.cli.main import main
from planner.network.error import NetworkError
from planner.problems.path_file import load_path_file
from planner.utils.input_files import MAX_BYTES, parse_json, read_json, read_text
from planner.workload.calibration import Calibration


def test_byte_order_mark(tmp_path: Path) -> None:
    """It is removed, and line endings are normalised."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert read_text(path) == "a\r\nb"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xfe", "not UTF-8"),
        ('{"a": 1}'.encode("utf-16-le"), "not UTF-8 text but UTF-16"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"9" * 5000, "not JSON"),
    ],
)
def test_invalid_json(tmp_path: Path, data: bytes, said: str) -> None:
    """One line with the path, as the requested exception."""
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(NetworkError, match=said) as error:
        read_json(path, error=NetworkError)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"x": {"a": 1, "b": 0, "a": 1}}]'])
def test_duplicate_keys_are_rejected(tmp_path: Path, text: str) -> None:
    """At any depth."""
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(NetworkError, match="an object has the key 'a' twice; keep one of them"):
        read_json(path, error=NetworkError)
    assert parse_json('{"a": 1, "a": 2}', "x", second={"a": "a_2"}) == {"a": 1, "a_2": 2}
    with pytest.raises(ValueError, match="x: an object has the key 'a' more than twice"):
        parse_json('{"a": 1, "a": 2, "a": 3}', "x", second={"a": "a_2"})


def test_every_json_reader_rejects_duplicate_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans, configs, networks, path problems and calibrations."""
    path = tmp_path / "a.json"
    path.write_text('{"format": "planner.network", "vocab_size": 1, "vocab_size": 2}')
    for read in (
        pl.load_network,
        pl.load_plan,
        pl.Workload.from_hf_config,
        load_path_file,
        Calibration.load,
    ):
        with pytest.raises(ValueError, match="an object has the key 'vocab_size' twice"):
            read(path)
    assert main(["check", str(path)]) == 2
    assert "an object has the key 'vocab_size' twice" in capsys.readouterr().err


def test_endless_files_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """Reading stops at the size limit."""
    with pytest.raises(ValueError, match="larger than 50 MB"):
        read_text("/dev/zero")
    assert main(["check", "/dev/zero"]) == 2
    assert "larger than 50 MB" in capsys.readouterr().err


def test_large_files_are_rejected_unread(tmp_path: Path) -> None:
    """A sparse file of two gigabytes."""
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(2_000_000_000)
    with pytest.raises(ValueError, match="larger than"):
        pl.load_plan(path)
    assert MAX_BYTES < 60_000_000, "a cycle of 60 MB is refused before it is parsed"


def test_invalid_paths(tmp_path: Path) -> None:
    """A folder, an empty path, and an invalid name."""
    for path in (tmp_path, tmp_path / "none", "a\0b"):
        with pytest.raises(ValueError, match=r"cannot be read|is no path"):
            read_text(path)
