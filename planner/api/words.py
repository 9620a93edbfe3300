"""Errors in the words of somebody who called a function: names of arguments, not of the command line's options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from fuseplan.planner.errors import FuseplanError

#: Whole phrases first.
_PHRASES = {
    "or pass --config path/to/config.json, or --module package.module:factory":
        "or pass the path of a config.json, a Hugging Face config, or an nn.Module with inputs",
    "give one of --model, --config and --module, not several": "give one model",
    "; `plan patterns` lists them all": "",
    "plan patterns lists them all": "fuseplan.planner.patterns.table.PATTERNS has them all",
    "`plan report` without --model": "`fuseplan.planner.report()` without model",
    "`plan db misses`": "`fuseplan.planner.misses()`", "`plan report steps`": "`.saved`",
    "`plan tune --no-shipped`": "`fuseplan.planner.tune(shipped=False)`",
}
#: A command with options, quoted, and one of these with what it is given.
_COMMAND = re.compile(r"`plan (tune|report|explain)((?: --[a-z-]+(?: [^-`\s][^`\s]*)?)*)`")
_OPTION = re.compile(r"--([a-z-]+)(?: ([^-\s]\S*))?")
#: Options whose argument has another name.
_ARGUMENTS = {"config": "model", "module": "model"}


@contextmanager
def python_words() -> Iterator[None]:
    """Whatever error of ours is raised inside comes out as a :class:`FuseplanError` in a Python user's words."""
    try:
        yield
    except FuseplanError as error:
        error.args = (in_python(str(error)),)
        raise
    except Exception as error:
        # The families of the other packages, which know nothing of this one's.
        if not type(error).__module__.startswith("fuseplan."):
            raise
        raise FuseplanError(in_python(str(error))) from error


def in_python(text: str) -> str:
    """A message of the command line, for somebody who called a function.

    >>> in_python("--kv-len 1: the cache must hold at least 2 tokens; see `plan report --device h200`")
    "kv_len 1: the cache must hold at least 2 tokens; see `fuseplan.planner.report(device='h200')`"
    """
    for phrase, words in _PHRASES.items():
        text = text.replace(phrase, words)
    text = _COMMAND.sub(_called, text)
    return re.sub(r"--([a-z][a-z-]*)", lambda found: _argument(found[1]), text)


def _called(found: re.Match[str]) -> str:
    options = _OPTION.findall(found[2])
    given = [f"{_argument(name)}={(value if value.isdigit() else repr(value)) if value else True}"
             for name, value in options]
    return f"`fuseplan.planner.{found[1]}({', '.join(given)})`"


def _argument(option: str) -> str:
    return _ARGUMENTS.get(option, option.replace("-", "_"))
