"""Fonts for names in any script: Matplotlib's default has no 東京, and draws boxes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import bidirectional, category

PREFERRED = ("Noto Sans", "Source Han Sans", "WenQuanYi", "IPA", "Droid Sans", "Arial Unicode")
"""Families made for many scripts; others follow in order of file name."""
LEFT_TO_RIGHT = "\u200e"
MAX_SHOWN = 12
INVISIBLE = ("Cc", "Cf", "Zl", "Zp", "Zs")
"""Unicode categories that need no glyph."""


class MissingGlyphs(UserWarning):
    """Warning: no font on this machine has some letters of a picture."""


def fit_fonts(figure: Any) -> str:
    """Give every text of a figure fonts that have its letters."""
    from matplotlib import font_manager
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    letters = {c for text in texts for c in text.get_text() if category(c) not in INVISIBLE}
    default = Path(font_manager.findfont(font_manager.FontProperties()))
    missing = letters - _letters_of(default)
    if not missing:
        return ""
    families = []
    for path in _other_fonts(default):
        drawable = missing & _letters_of(path)
        if drawable:
            font_manager.fontManager.addfont(path)
            families.append(font_manager.get_font(path).family_name)
            missing -= drawable
        if not missing:
            break
    for text in texts:
        if set(text.get_text()) - _letters_of(default):
            text.set_fontfamily([font_manager.get_font(default).family_name, *families])
    if not missing:
        return ""
    shown = "".join(sorted(missing)[:MAX_SHOWN])
    return (
        f"no installed font has the letters {shown}, a picture shows boxes instead; install one "
        "that has, such as Noto Sans CJK"
    )


def in_line(name: str) -> str:
    """A name whose direction of writing does not affect its neighbours."""
    turns = any(bidirectional(c) in ("R", "AL", "AN") for c in name)
    return f"{LEFT_TO_RIGHT}{name}{LEFT_TO_RIGHT}" if turns else name


def _other_fonts(default: Path) -> Iterable[Path]:
    from matplotlib import font_manager

    fonts = sorted({Path(path) for path in font_manager.findSystemFonts()} - {default})
    names = [name.replace(" ", "").lower() for name in PREFERRED]

    def rank(path: Path) -> tuple[int, bool, str]:
        stem = path.stem.replace("-", "").replace("_", "").lower()
        place = next((k for k, name in enumerate(names) if stem.startswith(name)), len(names))
        return place, "regular" not in stem, str(path)

    return sorted(fonts, key=rank)


@cache
def _letters_of(path: Path) -> frozenset[str]:
    """Letters of a font; none if it cannot be read."""
    from matplotlib import font_manager

    try:
        font = font_manager.get_font(path)
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(map(chr, font.get_charmap())) if font.scalable else frozenset()
