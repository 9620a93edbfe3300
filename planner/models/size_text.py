"""Sizes as people write them: plain digits, joined by commas or by x."""

from __future__ import annotations

import re

from fuseplan.planner.errors import ShapeError

#: The largest size of anything.
LARGEST = 2**31 - 1


def read_size(text: str, where: str, example: str) -> int:
    """A size from 1 to :data:`LARGEST`; int() would also take signs, underscores and digits of other scripts.

    Raises:
        ShapeError: The text is no such size; the message names ``where`` it is given, and an ``example``.

    >>> read_size("128", "--prefill", "--prefill 512")
    128
    """
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ShapeError(f"{where}: {text!r} is no positive size; write it like {example}")
    return fits(int(text) if len(text) < 20 else LARGEST + 1, where, text)


def fits(size: int, where: str, text: str) -> int:
    """The size, or the number of rows that several make together.

    Raises:
        ShapeError: It is larger than any that can be planned; the message quotes ``text``.
    """
    if size > LARGEST:
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        raise ShapeError(f"{where}: {shown} is more than {LARGEST}, the largest size there is")
    return size
