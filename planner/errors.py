"""Every mistake a user can make, as one family of one-line messages, and two ways to refuse a group a kernel."""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fuseplan.search.errors import OWN_FAULTS, PACKAGES, SpelledError
from fuseplan.search.errors import Argument as Argument
from fuseplan.search.errors import Command as Command

#: Characters of somebody else's message in one of ours.
_LONGEST = 300
#: The least similarity of a close name, and how far below the best one another may lie.
_CLOSE, _SPREAD = 0.5, 0.2


class FuseplanError(SpelledError):
    """Base of the family. The command line prints one line and exits with ``exit_code``."""

    exit_code = 2


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names closest in spelling to ``name``, best first; empty when nothing is close.

    Names much less similar than the best one are left out.
    >>> nearest("lama", ["llama", "gpt2"])
    ['llama']
    """
    found = difflib.get_close_matches(name, sorted(set(known)), cutoff=_CLOSE)
    like = [difflib.SequenceMatcher(None, one, name).ratio() for one in found]
    return [one for one, ratio in zip(found, like, strict=True) if ratio >= like[0] - _SPREAD]


def meant(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """``"did you mean llama?"``, or something else where no known name is close."""
    close = nearest(name, known)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


def in_words(error: BaseException) -> str:
    """What somebody else's error says, for a line of ours: its first sentence, without the names of Python's classes.

    >>> in_words(ValueError("Validation error for 'size':\\nTypeError: expected int\\nand more"))
    "Validation error for 'size': expected int"
    """
    # Dynamo's explanation of an op that fails has the op's own words in it, quoted.
    quoted = re.search(r"with fake tensors: .*: got \w+\((['\"])(.+?)\1\)", str(error))
    said = quoted[2] if quoted else f"no such key: {error}" if type(error) is KeyError and error.args else str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    text = re.sub(r"\b(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Warning)\b(?:: ?)?", "", text).strip() or "no reason given"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def user_line(error: BaseException) -> str:
    """``" (line 3 of toys.py)"``: the innermost line on an error's way that is no library's; empty without any."""
    ours, installed = (*PACKAGES, sysconfig.get_path("stdlib") + "/", "<"), {"site-packages", "dist-packages"}
    frames = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)  # Dynamo's has the former
    found = [one for one in frames
             if not one.filename.startswith(ours) and installed.isdisjoint(Path(one.filename).parts)]
    return f" (line {found[-1].lineno} of {Path(found[-1].filename).name})" if found else ""


class _UnknownNameError(FuseplanError):
    """A name that is not in a closed list."""

    kind: str
    advice: tuple[str, ...]

    def __init__(self, name: str, known: Iterable[str] = ()) -> None:
        known = sorted(set(known))
        hint = meant(name, known, f"known: {', '.join(known)}" if 0 < len(known) <= 12 else "")
        more, *arguments = self.advice
        super().__init__("unknown {} {!r}{}; " + more, self.kind, name, hint and f"; {hint}", *arguments)
        self.name, self._known = name, known

    def __reduce__(self) -> tuple[type, tuple[str, list[str]]]:  # a worker's error comes back through a pipe
        return type(self), (self.name, self._known)


class UnknownModelError(_UnknownNameError):
    """No preset of that name."""

    kind = "model"
    advice = ("or give a config.json ({}) or package.module:factory ({})", Argument("config"), Argument("module"))


class UnknownPatternError(_UnknownNameError):
    """No named pattern of that name."""

    kind = "pattern"
    advice = ("plan patterns lists them all",)


class UnknownOpError(_UnknownNameError):
    """An op name that PyTorch does not have, or that the planner cannot execute."""

    kind = "op"
    advice = ('write it as "aten.<name>.<overload>"',)


class ConfigError(FuseplanError):
    """A config file, option or value that cannot be used."""


class NothingForDeviceError(ConfigError):
    """A manifest has no model for a device."""


class ShapeError(FuseplanError):
    """A shape that cannot be parsed, or that does not fit the op it is given to."""


class GraphError(FuseplanError):
    """A hand-built graph that cannot be run: a value nobody produces, a cycle, an argument the op does not take."""


class CompilerMissingError(FuseplanError):
    """No kernel back end can run on this machine: on a CPU, there is no C++ compiler."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no kernel back end can be used, so there is nothing to tune ({reason})")


class DeviceError(FuseplanError):
    """A device was asked for that this machine does not have, or that does not fit the plan."""


class CaptureError(FuseplanError):
    """A model whose graph cannot be captured or normalised; the message names the op or the step."""


class PlanError(FuseplanError):
    """A plan that is missing, or that does not fit the model, device or shapes it is used with."""


@contextmanager
def one_family() -> Iterator[None]:
    """Errors of our other packages, raised inside, come out as a :class:`FuseplanError`."""
    try:
        yield
    except FuseplanError:
        raise
    except Exception as error:
        if not type(error).__module__.startswith("fuseplan."):
            raise
        raise FuseplanError(*error.args if isinstance(error, SpelledError) else (str(error),)) from error


class NotLowerable(Exception):
    """The group cannot be one kernel; the message says why, naming the op."""


class RefusedError(Exception):
    """A group or graph that must stay unfused; the message says why."""


def failure_reason(error: Exception) -> str:
    """One line for the counters, of an error that costs a group or a graph its kernels."""
    OWN_FAULTS.tolerate(error)
    if isinstance(error, NotLowerable | RefusedError | FuseplanError):
        return str(error).splitlines()[0]
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
