"""Texts that a reader takes for equal."""

from __future__ import annotations

import re
import unicodedata

# The property Default_Ignorable_Code_Point of Unicode: soft hyphen, zero-width space, variation selectors ..
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def fold(text: str) -> str:
    """Return the text in lower case and in one form of Unicode, without invisible characters.

    Equal: composed and decomposed letters, wide letters, ligatures, capitals, "İstanbul" and "istanbul".
    """
    if text.isascii():
        return text.lower()
    folded = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).casefold()
    return unicodedata.normalize("NFKC", folded.replace("i\N{COMBINING DOT ABOVE}", "i"))
