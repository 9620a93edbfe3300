"""Text that came from storage, as a terminal, a log or a message may hold it."""

from __future__ import annotations

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 4


def plain(text: str) -> str:
    r"""``text`` on one line, with everything that a terminal would obey or not show written as an escape.

    >>> plain("rms\x1b[31m norm\n")
    'rms\\x1b[31m norm\\n'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def brief(value: object) -> str:
    """A stored value in a message: its start and its end, as :func:`plain` text."""
    return plain(_SHORT.repr(value))
