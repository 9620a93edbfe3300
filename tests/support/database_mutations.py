"""Databases and exports as they may be after damage, by mistake or in somebody's interest; all by seed."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import random
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from database_expected import Expected, Place

from fuseplan.kernels.cpp import config as cpp_config
from fuseplan.kernels.triton import config as triton_config
from fuseplan.search.store import codec

#: Changes the database at a path, and says what of that ``plan db verify`` must find beside what the file shows
#: (:mod:`database_expected`). The canary is a command line and a piece of Python that would leave a file.
Mutation = Callable[[random.Random, Path, "Canary"], Expected]
#: Where the file itself says what is wrong with it: SQLite may find damage, or none that matters.
_FILE = Expected(file=None)
_TABLES = ("tuning_records", "plan_records", "trials", "misses", "devices", "captures")
_PAGE = 4096


class Canary:
    """Texts that leave a file where they are run, by a shell, by Python, or by a C compiler's preprocessor."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def text(self, rng: random.Random) -> str:
        write = f"open({str(self.file)!r}, 'w').close()"
        return rng.choice([
            f'"""\n{write}\n"""', f"'''\n{write}\n'''", f"*/\n{write}\n/*", f"0\n{write}", f"__import__('os').{write}",
            f"; touch {self.file};", f"$(touch {self.file})", f"`touch {self.file}`", f"| touch {self.file}",
            f"{{{{ {write} }}}}", f"x\"); {write} #", f"{{{write}}}", f"-include {self.file}", f"../../{self.file}",
            "[/red]", "[bold", "\x1b]0;title\x07\x1b[2J", "<script>alert(1)</script>", "\\", "\x00", "\u202e", "$x^$",
        ])


# -- the file ---------------------------------------------------------------------------------------------------


def flip_bits(rng: random.Random, path: Path, _canary: Canary) -> Expected:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return _FILE


def overwrite(rng: random.Random, path: Path, _canary: Canary) -> Expected:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    length = min(rng.choice((1, 16, 300, _PAGE, 5 * _PAGE)), len(content) - start)
    content[start : start + length] = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    path.write_bytes(content)
    return _FILE


def mix_pages(rng: random.Random, path: Path, _canary: Canary) -> Expected:
    content = path.read_bytes()
    pages = [content[at : at + _PAGE] for at in range(0, len(content), _PAGE)]
    one, other = rng.randrange(len(pages)), rng.randrange(len(pages))
    if rng.random() < 0.5:
        pages[one], pages[other] = pages[other], pages[one]
    else:
        pages[one] = pages[other]
    path.write_bytes(b"".join(pages))
    return _FILE


def cut(rng: random.Random, path: Path, _canary: Canary) -> Expected:
    content = path.read_bytes()
    end = rng.choice((0, 1, 15, 16, 50, 100, 600, _PAGE, rng.randrange(len(content))))
    path.write_bytes(content[:end] + rng.choice((b"", b"\0" * 100, rng.randbytes(_PAGE))))
    return _FILE


# -- rows and the schema ----------------------------------------------------------------------------------------

_SQL_VALUES = (
    "NULL", "x'ff00fe'", "12", "-1", "1e308", "9223372036854775807", "''", "cast(x'7bff' as text)", "'{}'", "'[]'",
    f"'{'[' * 2000}{']' * 2000}'", f"'{{\"a\": {'9' * 400}}}'", f"'{'9' * 5000}'", "'NaN'", "randomblob(3000)",
)


def odd_values(rng: random.Random, path: Path, canary: Canary) -> Expected:
    with _without_constraints(path) as raw:
        for _ in range(rng.choice((1, 1, 3))):
            table = rng.choice(_TABLES)
            column = rng.choice([row[1] for row in raw.execute(f"pragma table_info({table})")])
            value, given = (rng.choice(_SQL_VALUES), ()) if rng.random() < 0.8 else ("?", (canary.text(rng),))
            where = f"rowid = {rng.choice(_rows(raw, table))}" if rng.random() < 0.8 else "1"
            with contextlib.suppress(sqlite3.IntegrityError):
                raw.execute(f"update {table} set {column} = {value} where {where}", given)
    return Expected()


def exchange_payloads(rng: random.Random, path: Path, _canary: Canary) -> Expected:
    with _without_constraints(path) as raw:
        one, other = rng.choice(_TABLES[:2]), rng.choice(_TABLES[:2])
        payload, digest = raw.execute(
            f"select payload, checksum from {one} where rowid = ?", (rng.choice(_rows(raw, one)),)
        ).fetchone()
        where = rng.choice(_rows(raw, other))
        raw.execute(f"update {other} set payload = ?, checksum = ? where rowid = ?", (payload, digest, where))
    return Expected()


def change_schema(rng: random.Random, path: Path, canary: Canary) -> Expected:
    table = rng.choice((*_TABLES, "fuseplan_meta"))
    with _without_constraints(path) as raw:
        column = rng.choice([row[1] for row in raw.execute(f"pragma table_info({table})")])
        statement, broken = rng.choice([
            (f"drop table {table}", True), (f"alter table {table} rename to x{table}", True),
            (f"delete from {table}", table == "fuseplan_meta"),
            (f"alter table {table} rename column {column} to other", True), ("delete from fuseplan_meta", True),
            (f"alter table {table} add column extra text default 7", False), ("pragma application_id = 77", None),
            ("update fuseplan_meta set value = '77' where name = 'schema_version'", True),
            ("update fuseplan_meta set value = NULL", True),
            (f"create trigger t after insert on {table} begin delete from {table}; end", True),
            (f"create trigger t before update on {table} begin select raise(abort, 'no'); end", True),
        ])
        raw.execute(statement)
        if rng.random() < 0.2:
            with contextlib.suppress(sqlite3.Error):  # what came before may have taken the table away, or closed it
                changed = raw.execute("update fuseplan_meta set value = ?", (canary.text(rng),)).rowcount
                broken = broken or changed > 0
        if rng.random() < 0.2:
            raw.execute(f"create view v{table} as select * from missing")
            broken = True
    return Expected(file=broken)


@contextlib.contextmanager
def _without_constraints(path: Path) -> Any:
    """A connection to the file whose tables allow anything."""
    with contextlib.closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("pragma writable_schema=on")
        raw.execute("update sqlite_master set sql = replace(sql, ' NOT NULL', '')")
        raw.execute("pragma writable_schema=reset")
        yield raw


def _rows(raw: sqlite3.Connection, table: str) -> list[int]:
    return [row[0] for row in raw.execute(f"select rowid from {table}")]


# -- what payloads say: sealed again, so that only a reader's own checks can find it -----------------------------

_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 3, 7, 2**31, 2**63, -(2**63), 10**18, 10**400, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, "", "x",
    [], {}, [[]], {"a": 1}, [0, 0], "cpp", "triton", "fused", "unfused", "eager", "graph", "float32",
)


_CONFIG_VALUES = (0, -1, 1, 2, 3, 7, 10**9, 2**40, "x", True, 1.5)


def edit_json(rng: random.Random, path: Path, canary: Canary) -> Expected:
    table = rng.choice((*_TABLES[:2], *_TABLES))

    def change(data: Any) -> tuple[str, bool]:
        for _ in range(rng.choice((1, 1, 2, 5))):
            _edit(rng, data, canary)
        text = json.dumps(data)
        odd = rng.random()
        if odd < 0.05 and text.startswith("{"):
            return '{"key": 1, ' + text[1:], "key" in data
        if odd < 0.1:
            return text.replace("1", rng.choice(("NaN", "Infinity", "1e999", "9" * 5000)), 1), False
        return (text, False) if odd < 0.95 else (text[: rng.randrange(len(text))], False)

    return reseal(rng, path, table, change)


def edit_configs(rng: random.Random, path: Path, canary: Canary) -> Expected:
    def change(data: Any) -> tuple[str, bool]:
        holders = (data, *data.get("groups", ()), *data.get("finalists", ()))
        for config in [one["config"] for one in holders if one.get("config")]:
            name = rng.choice(sorted(config))
            value = canary.text(rng) if rng.random() < 0.2 else rng.choice(_CONFIG_VALUES)
            if rng.random() < 0.15:
                config[canary.text(rng) if rng.random() < 0.5 else "more"] = value
            elif rng.random() < 0.1:
                del config[name]
            else:
                config[name] = value
        served = data.get("groups", (data,))
        return json.dumps(data), any(is_impossible(one.get("config") or {}, _back_end(one)) for one in served)

    return reseal(rng, path, rng.choice(("plan_records", "plan_records", "tuning_records", "trials")), change)


def _back_end(holder: Mapping[str, Any]) -> str:
    """What runs a group of a plan, or the kernel of a record."""
    return str(holder.get("implementation", holder.get("backend")))


def is_impossible(config: Mapping[str, Any], back_end: str) -> bool:
    """Whether no kernel of a back end has ever had such a configuration."""
    known = {"cpp": cpp_config.PARAMETERS, "triton": triton_config.PARAMETERS, "ninetoothed": triton_config.PARAMETERS}
    choices = {one.name: one.choices for one in known.get(back_end, ())}
    return bool(choices) and any(
        name not in choices or not any(value == one and type(value) is type(one) for one in choices[name])
        for name, value in config.items()
    )


def edit_groups(rng: random.Random, path: Path, canary: Canary) -> Expected:
    def change(data: Any) -> tuple[str, bool]:
        for _ in range(rng.choice((1, 1, 2))):
            _edit_groups(rng, data["groups"], canary)
        ops = [op for group in data["groups"] for op in group["ops"]]
        empty = any(not group["ops"] or not group["implementation"] for group in data["groups"])
        return json.dumps(data), empty or len(set(ops)) < len(ops) or min(ops, default=0) < 0

    return reseal(rng, path, "plan_records", change)


def _edit_groups(rng: random.Random, groups: list[Any], canary: Canary) -> None:
    if not groups:
        return
    one, other = rng.choice(groups), rng.choice(groups)
    how = rng.randrange(9)
    if how == 0:
        groups.remove(one)
    elif how == 1:
        groups.append(dict(one))
    elif how == 2:
        one["ops"] = one["ops"] + [rng.choice((-1, 0, 1, 2, 5, 99, 10**9))]
    elif how == 3:
        one["ops"] = one["ops"][1:]
    elif how == 4:
        one["ops"], other["ops"] = other["ops"], one["ops"]
    elif how == 5:
        one["ops"] = rng.sample(one["ops"], len(one["ops"]))
    elif how == 6:
        one["workload"] = rng.choice(("", canary.text(rng)))
    elif how == 7:
        one["implementation"] = rng.choice(("", "aten", "sdpa.cudnn", "cpp", "triton", "reference", canary.text(rng)))
    else:
        rng.shuffle(groups)


def _edit(rng: random.Random, data: Any, canary: Canary) -> None:
    """Change one value somewhere in a JSON object."""
    holder: Any = data
    while True:
        names = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not names:
            return
        name = rng.choice(names)
        if isinstance(holder[name], dict | list) and holder[name] and rng.random() < 0.85:
            holder = holder[name]
            continue
        value = canary.text(rng) if rng.random() < 0.25 else copy.deepcopy(rng.choice(_VALUES))
        how = rng.random()
        if how < 0.1:
            del holder[name]
        elif how < 0.2 and isinstance(holder, dict):
            holder[canary.text(rng)] = value
        elif how < 0.3 and isinstance(holder[name], int | float):
            holder[name] = holder[name] * rng.choice((-1, 0, 2, 1000))
        else:
            holder[name] = value
        return


def reseal(rng: random.Random, path: Path, table: str, change: Callable[[Any], tuple[str, bool]]) -> Expected:
    """Change payloads and make their checksums right. ``change`` says whether nobody can have stored what it made."""
    found: set[Place] = set()
    with _without_constraints(path) as raw:
        for row in _rows(raw, table) if rng.random() < 0.5 else [rng.choice(_rows(raw, table))]:
            (text,) = raw.execute(f"select payload from {table} where rowid = ?", (row,)).fetchone()
            payload, impossible = change(json.loads(text))
            found |= {(table, row)} if impossible else set()
            raw.execute(f"update {table} set payload = ? where rowid = ?", (payload, row))
            if table not in ("trials", "misses"):
                raw.execute(f"update {table} set checksum = ? where rowid = ?", (codec.checksum(payload), row))
    return Expected(frozenset(found))


# -- exports ----------------------------------------------------------------------------------------------------


def cut_export(rng: random.Random, path: Path, _canary: Canary) -> Expected:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])
    return Expected()


def damage_export(rng: random.Random, path: Path, canary: Canary) -> Expected:
    rng.choice((flip_bits, overwrite))(rng, path, canary)
    return Expected()


_LINES = ("[" * 3000, "{}", "null", "9" * 5000, '{"device": "a", "spec": {}}', '{"tuning_record": []}')


def forge_export(rng: random.Random, path: Path, canary: Canary) -> Expected:
    """Some lines edited or exchanged, the trailer made right again."""
    lines = path.read_text().splitlines()
    for at in rng.sample(range(0 if rng.random() < 0.1 else 1, len(lines) - 1), rng.choice((1, 1, 4))):
        data = json.loads(lines[at])
        (kind,) = [name for name in data if name != "device"][:1] or ["device"]
        if kind == "plan_record" and rng.random() < 0.4:
            _edit_groups(rng, data[kind]["groups"], canary)
        else:
            _edit(rng, data if rng.random() < 0.1 else data[kind] if isinstance(data[kind], dict) else data, canary)
        lines[at] = json.dumps(data) if rng.random() < 0.7 else rng.choice(_LINES)
    head = "".join(f"{line}\n" for line in lines[:-1])
    digest = hashlib.sha256(head.encode()).hexdigest()
    path.write_text(head + json.dumps({"trailer": {"count": len(lines) - 2, "sha256": digest}}) + "\n")
    return Expected()


#: Of a database's file, and how often each is drawn.
DATABASES: Mapping[str, tuple[Mutation, int]] = {
    "bits": (flip_bits, 2), "bytes": (overwrite, 2), "pages": (mix_pages, 1), "cut": (cut, 1),
    "values": (odd_values, 3), "exchanged": (exchange_payloads, 1), "schema": (change_schema, 1),
    "JSON": (edit_json, 4), "configs": (edit_configs, 3), "groups": (edit_groups, 2),
}
#: Of an export that is then imported.
EXPORTS: Mapping[str, tuple[Mutation, int]] = {
    "import cut": (cut_export, 1), "import damaged": (damage_export, 1), "import forged": (forge_export, 3),
}
