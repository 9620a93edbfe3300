"""Folders whose files are loaded as code: nobody but this user may write there.

A library or module that somebody else put under the right name would run in this process.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger("fuseplan")


def own_folder(wanted: Path) -> Path:
    """``wanted``, made with mode 0700 where it is missing, if nobody else may write there; else a new private folder.

    The private folder goes when this process ends, and one warning says so.
    """
    wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = is_exposed(wanted)
    return wanted if reason is None else _private_folder(wanted, reason)


def is_exposed(path: Path) -> str | None:
    """Why others could have written a file or folder, or None. What does not exist is exposed, too."""
    try:
        found = path.stat()
    except OSError as error:
        return error.strerror or "it cannot be read"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write there (mode {stat.S_IMODE(found.st_mode):o})"
    return None


@lru_cache
def _private_folder(wanted: Path, reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuseplan-"))
    atexit.register(_remove, folder, os.getpid())
    logger.warning(
        "the kernel cache %s is not used: %s; kernels are kept in %s until this process ends. Remove that cache or "
        "give it mode 700", wanted, reason, folder,
    )
    return folder


def _remove(folder: Path, owner: int) -> None:
    """Of processes that share the folder by a fork, the one that made it removes it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
