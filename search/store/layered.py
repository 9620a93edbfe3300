"""Tuned records that ship with the package, read-only, under the user's own database."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from fuseplan.search.errors import DatabaseError, RecordError
from fuseplan.search.store import codec
from fuseplan.search.store.database import Database, Lookup, reservations
from fuseplan.search.store.record import PlanRecord, RecordKey, TuningRecord
from fuseplan.search.store.rows import R
from fuseplan.search.store.transfer import KINDS, Entry, checked_lines, entry_of

#: Where they are. Not importlib.resources: it cannot read a namespace package behind an editable install's path hook.
FOLDER = Path(__file__).parent / "records"


def shipped_files(device: str = "") -> tuple[Path, ...]:
    """Export files of the package, perhaps of one device, by name (``records/<device key>-<regime>.jsonl``)."""
    return tuple(sorted(FOLDER.glob(f"{device}*.jsonl")))


def shipped_devices() -> tuple[str, ...]:
    """Keys of the devices that records ship for, in order."""
    return tuple(dict.fromkeys(one.stem.rsplit("-", 1)[0] for one in shipped_files()))


class LayeredDatabase:
    """Look-ups and lists that ask the user's database first, then the shipped records. Never raises.

    A stale record of the user's does not hide a shipped hit; a shipped stale record is offered last. What another tune
    than ``run`` wrote is stale; "" for nothing.
    """

    def __init__(self, user: Database, shipped: Iterable[Path], run: str = "") -> None:
        self.user = user
        self._run = run
        self._files = tuple(shipped)

    def get_record(self, key: RecordKey) -> Lookup[TuningRecord]:
        """The tuning record of exactly this key, from the first layer that has a hit."""
        return self._look_up(TuningRecord, key, self.user.get_record(key).record)

    def get_plans(self, keys: Iterable[RecordKey]) -> dict[RecordKey, Lookup[PlanRecord]]:
        """The plans of several region keys, each from the first layer that has a hit."""
        return {key: self._look_up(PlanRecord, key, mine.record) for key, mine in self.user.get_plans(keys).items()}

    def plans(self) -> Iterator[PlanRecord]:
        """Every plan of the user's, and the shipped ones that a look-up would find beside them."""
        return self._all(PlanRecord, self.user.plans())

    def records(self) -> Iterator[TuningRecord]:
        """Every tuning record of the user's, and the shipped ones that a look-up would find beside them."""
        return self._all(TuningRecord, self.user.records())

    def captures(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Those that shipped, under the user's own of the same names."""
        shipped: dict[str, dict[str, Any]] = {}
        if not all(self._mismatch(plan) for plan in self._decoded(PlanRecord)):  # else they speak of what nobody finds
            shipped = {entry.key: entry.value for entry in self._entries(f'{{"capture":"{prefix}')}
        return shipped | self.user.captures(prefix)

    def misses(self) -> list[dict[str, Any]]:
        return self.user.misses()

    def get_device(self, device: str) -> dict[str, Any] | None:
        """The device as the user's probe found it, else as the shipped one did."""
        own = self.user.get_device(device)
        return own or next((entry.value for entry in self._entries(f'{{"device":"{device}"')), None)

    def capture_names(self, prefix: str) -> set[str]:
        return self.user.capture_names(prefix)

    def _look_up(self, cls: type[R], key: RecordKey, users: R | None) -> Lookup[R]:
        mine = Lookup(users, self._mismatch(users))
        if mine.hit is not None:
            return mine
        same = [record for record in self._decoded(cls, f'"{key.workload}"') if record.key == key]
        found = same[-1] if same else None  # several files may have it
        shipped = Lookup(found, self._mismatch(found), shipped=found is not None)
        return shipped if shipped.hit is not None or mine.record is None else mine

    def _mismatch(self, record: TuningRecord | PlanRecord | None) -> tuple[str, ...]:
        return reservations(record, self.user.versions, self._run) if record is not None else ()

    def _all(self, cls: type[R], users: Iterator[R]) -> Iterator[R]:
        mine = {record.key: record for record in users}
        shipped = {record.key: record for record in self._decoded(cls) if not self._mismatch(record)}
        found = mine | shipped | {key: own for key, own in mine.items() if not self._mismatch(own)}
        return (found[key] for key in sorted(found, key=astuple))

    def _decoded(self, cls: type[R], text: str = "") -> Iterator[R]:
        """The shipped records of one kind; those whose line holds ``text``."""
        return (entry.value for entry in self._entries(f'{{"{KINDS[cls]}"', text))

    def _entries(self, start: str, text: str = "") -> Iterator[Entry]:
        """What can be read of lines that begin with ``start`` and hold ``text``: whole files would take too long."""
        for line in (line for path in self._files for line in _data_lines(path)):
            if line.startswith(start) and text in line:
                try:
                    yield _entry(line)
                except RecordError as error:
                    warnings.warn(f"shipped record skipped: {error}", stacklevel=3)


@functools.lru_cache(maxsize=4096)
def _entry(line: str) -> Entry:
    """What a line holds, decoded once per process: a tune looks a plan up, checks its times and reports it."""
    return entry_of(codec.parse(line, "line"))


@functools.lru_cache(maxsize=16)
def _data_lines(path: Path) -> tuple[str, ...]:
    """The lines of an export file, read and checked once per process; none, with a warning, of an unreadable one."""
    try:
        return tuple(checked_lines(path))
    except DatabaseError as error:
        warnings.warn(f"shipped records skipped: {error}", stacklevel=3)
        return ()
