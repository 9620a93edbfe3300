"""What can go wrong while searching, measuring or storing, and text that came from storage as a message may hold it.

Every message says what happened and what to do.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 4


#: What Python raises where a program is wrong, and neither its input nor its machine is.
_FAULTS = (AssertionError, AttributeError, IndexError, KeyError, NameError, TypeError)
#: Where our own code lies.
PACKAGES = tuple(str(Path(__file__).parents[1] / name) + "/" for name in ("planner", "search", "kernels", "costmodel"))


class OwnFaults:
    """Faults of our own code that a wide ``except`` caught: a user is still served, a test must fail (``raised``)."""

    def __init__(self) -> None:
        self.raised = False
        #: How often each came, by class and line.
        self.counts: Counter[str] = Counter()

    def tolerate(self, error: BaseException) -> None:
        """Count a caught error if it is, or was caused by, a fault of our own; raise it again where ``raised``."""
        one: BaseException | None = error
        while one is not None:
            if isinstance(one, _FAULTS) and (place := _raised_at(one)) is not None:
                self.counts[f"{type(one).__name__} at {place}"] += 1
                if self.raised:
                    raise error
            one = one.__cause__


def _raised_at(error: BaseException) -> str | None:
    """File and line of our own code that raised an error; None where another's did."""
    last = error.__traceback__  # asked often: traceback.extract_tb() would look at the source file of every frame
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not last.tb_frame.f_code.co_filename.startswith(PACKAGES):
        return None
    return f"{Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"


OWN_FAULTS = OwnFaults()


class Argument(str):
    """The name of an argument in an error's message. Python has it as it is; the command line writes its option."""


class Command(Argument):
    """What a message advises to run, by the name of a command: a function of that name in Python."""

    def __str__(self) -> str:
        return f"`fuseplan.{str.__str__(self)}()`"


class SpelledError(Exception):
    """An error whose message is a template for its ``values``, where it has any; whoever shows it spells arguments."""

    def __init__(self, message: str, *values: object) -> None:
        super().__init__(message, *values)

    def __str__(self) -> str:
        return self.spelled(str)

    def spelled(self, spell: Callable[[Argument], str]) -> str:
        """The message with each argument, of an error in it too, written as ``spell`` says."""
        message, *values = self.args
        if not values:
            return str(message)
        return str(message).format(*(
            spell(one) if isinstance(one, Argument) else one.spelled(spell) if isinstance(one, SpelledError) else one
            for one in values))


class SearchError(SpelledError):
    """Base of the search package's errors."""


class SubjectError(SearchError):
    """A subject whose own unfused chain or reference fails: nothing can be compared with it."""


class NothingCompilesError(SubjectError):
    """No kernel of a subject compiles, nor has any other one in this tune: no verdict on the kernels."""


class MachineFailureError(SearchError):
    """The machine fails what a tune needs (disk, memory, permissions): no verdict on anything, nothing is stored."""


class RecordError(SearchError):
    """Data that does not describe a record of this schema."""


class DatabaseError(SearchError):
    """The tuning database cannot be opened, read or written."""


class UnreachableDatabaseError(DatabaseError):
    """A database server that went away or does not answer: to try again may mend it, ``at_once`` or after a while."""

    def __init__(self, message: str, at_once: bool = False) -> None:
        super().__init__(message)
        self.at_once = at_once


class BusyDatabaseError(UnreachableDatabaseError):
    """Others held what was asked for too long; ``at_once``: one of two that waited for each other was ended."""


class StudyError(SearchError):
    """A storage for Optuna's studies that cannot be opened."""


class CorruptDatabaseError(DatabaseError):
    """A database file that SQLite cannot read; ``cure`` says which command mends that."""

    cure = "`plan db prune` sets the damaged file aside and begins a new one"


class SchemaVersionError(DatabaseError):
    """A database or export of another schema version; nothing was modified."""


class ForeignDatabaseError(DatabaseError):
    """A database that belongs to another application; nothing was modified."""


class ReadOnlyDatabaseError(DatabaseError):
    """A database location that cannot be written."""


class ImportRefusedError(DatabaseError):
    """An export file that is truncated, altered, foreign or of another schema; the database is unchanged."""


def plain(text: str) -> str:
    r"""``text`` on one line, with everything that a terminal would obey or not show written as an escape.

    >>> plain("rms\x1b[31m norm\n")
    'rms\\x1b[31m norm\\n'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things in words; ``plural`` where that is not the noun with an s.

    >>> counted(1, "miss", "misses"), counted(0, "region")
    ('1 miss', '0 regions')
    """
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def brief(value: object) -> str:
    """A stored value in a message: its start and its end, as :func:`plain` text."""
    return plain(_SHORT.repr(value))
