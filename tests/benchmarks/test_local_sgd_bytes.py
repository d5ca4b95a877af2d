"""What rare averaging saves in bytes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.local_sgd_bytes import MODELS, main, measure


def test_messages_are_what_the_formulas_say(tmp_path: Path) -> None:
    """Averaging grows with parameters, pipelines with hidden only; the report has a row each."""
    small, large = measure("gpt2-tiny"), measure("gpt2-large")
    assert large.averaging_gb / small.averaging_gb > 5 * large.pipeline_gb / small.pipeline_gb
    out = tmp_path / "bytes.md"
    assert main(["--out", str(out)]) == 0
    text = out.read_text()
    assert all(f"| {name} |" in text for name in MODELS)
    assert (tmp_path / "bytes.png").stat().st_size > 1000
