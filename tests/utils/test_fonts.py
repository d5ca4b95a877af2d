"""Names in any script in figures: fonts with their glyphs, or a warning."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from planner.utils import fonts
from planner.utils.atomic_write import write_picture

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
OWN, OTHER = FONTS / "DejaVuSans.ttf", FONTS / "STIXNonUni.ttf"
LACKED = "東京"


def figure(text: str) -> Figure:
    """A figure with one text."""
    made = Figure(figsize=(1, 1))
    made.text(0.5, 0.5, text)
    return made


def test_letters_come_from_the_first_font_that_letters_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Texts that need no other font keep theirs."""
    monkeypatch.setattr(fonts, "_other_fonts", lambda own: [FONTS / "cmr10.ttf", OTHER])
    letter = min(c for c in fonts._letters_of(OTHER) - fonts._letters_of(OWN) if c > "\ue000")
    made = figure(f"a{letter}")
    plain = made.text(0.1, 0.1, "plain")
    write_picture(tmp_path / "a.png", made, dpi=50)
    text = next(t for t in made.findobj(Text) if letter in t.get_text())
    assert text.get_fontfamily() == ["DejaVu Sans", "STIXNonUnicode"]
    assert plain.get_fontfamily() == ["sans-serif"]
    assert not [w for w in recwarn if "font" in str(w.message)]


def test_missing_glyphs_are_reported_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one warning for all of them."""
    monkeypatch.setattr(fonts, "_other_fonts", lambda own: [OTHER])
    with pytest.warns(fonts.MissingGlyphs, match=r"東京|京東") as told:
        write_picture(tmp_path / "a.png", figure(LACKED), dpi=50)
    assert len(told) == 1
    assert (tmp_path / "a.png").stat().st_size > 0


def test_unreadable_fonts_are_skipped(tmp_path: Path) -> None:
    """Without an error."""
    (tmp_path / "bad.ttf").write_text("no font")
    assert fonts._letters_of(tmp_path / "bad.ttf") == frozenset()


def test_two_letters_look_different_where_a_font_letters_of_them(tmp_path: Path) -> None:
    """Placeholder boxes would all be equal."""
    if not any(set(LACKED) <= fonts._letters_of(path) for path in fonts._other_fonts(OWN)):
        pytest.skip("no font here has them")
    pictures = []
    for letter in LACKED:
        write_picture(tmp_path / "a.png", figure(letter), dpi=50)
        pictures.append((tmp_path / "a.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_right_to_left_names_are_isolated() -> None:
    """Other names stay as they are."""
    assert [fonts.in_line(name) for name in ("Tokyo", "東京", "a/0")] == ["Tokyo", "東京", "a/0"]
    assert fonts.in_line("دبي") == "\u200eدبي\u200e"
    assert not {c for c in fonts.in_line("דן") if c not in "דן"} - {"\u200e"}
