"""A manifest: models that are tuned together, with their sizes and devices, as a TOML file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from fuseplan.costmodel.devices import KINDS
from fuseplan.planner.errors import ConfigError, meant
from fuseplan.planner.models.sources import parsed_file


@dataclass(frozen=True)
class ModelArguments:
    """What says which model or pattern is planned, and what for: as the command line, Python or a manifest give it.

    ``at_hand`` is a module or a Hugging Face config, ``inputs`` are a module's. ``regime`` is by default ``"eager"``.
    """

    model: str | None = None
    config: Path | None = None
    module: str | None = None
    at_hand: Any = None
    inputs: Any = None
    pattern: str | None = None
    shape: Any = None
    decode: Any = None
    kv_len: int | None = None
    prefill: Any = None
    dtype: Any = None
    layers: int | None = None
    pack_weights: bool = False
    calls: bool = True
    regime: str | None = None
    numerics: str = "fp32"

    def given(self) -> list[str]:
        """Names of what says which model it is, and at which sizes, as a user has them."""
        names = [one.name for one in fields(ModelArguments) if one.default is None and one.name != "regime"]
        return [{"at_hand": "model"}.get(name, name) for name in names if getattr(self, name) is not None]


@dataclass(frozen=True, kw_only=True)
class ManifestModel(ModelArguments):
    """One model, or one pattern, for one dtype and one way to launch and to round. A config's path is absolute.

    Attributes:
        where: Its table, as messages name it: ``models.toml: model 2 (qwen3)``.
        name: What tables and reports call it; "" for what its source is called.
        devices: Kinds (``"cpu"``, ``"cuda"``) or parts of names (``"h100"``) of devices to tune it on; () for any.
    """

    where: str
    name: str = ""
    regime: str = "eager"
    devices: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Its name, or what it is made from."""
        return self.name or str(self.model or self.config or self.module or self.pattern)

    def is_for(self, device: str) -> bool:
        """Whether it is to be tuned on a device, by that one's key: ``cuda-nvidia-h200-4702ed953224``."""
        kind = device.split("-")[0]
        wanted = ["-".join(one.lower().split()) for one in self.devices]
        return not wanted or any(one == kind if one in KINDS else one in device for one in wanted)


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read: its models in order, one for each dtype, regime and numerics of a table."""

    path: Path
    models: tuple[ManifestModel, ...]


def read_manifest(path: str | Path) -> Manifest:
    """The models of a manifest, whose paths start at its own folder; ConfigError names what is wrong in it."""
    path = Path(path).expanduser()
    content = parsed_file(path, "manifest", "TOML", tomllib.loads)
    _known(content, ("defaults", "model"), path.name)
    tables, defaults = content.get("model", []), content.get("defaults", {})
    if not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
        raise ConfigError(f"{path.name} has no models: begin each one with a line [[model]]")
    if not isinstance(defaults, dict):
        raise ConfigError(f"{path.name}: defaults is no table; begin it with a line [defaults]")
    shared = _values(defaults, _SHARED, f"{path.name}: defaults")
    models = (one for number, table in enumerate(tables, 1) for one in _models(path, number, table, shared))
    return Manifest(path, tuple(models))


def _models(path: Path, number: int, table: Mapping[str, Any], shared: Mapping[str, Any]) -> Iterator[ManifestModel]:
    """The models of one table."""
    called = next((table[key] for key in ("name", *_SOURCES) if isinstance(table.get(key), str)), "")
    where = f"{path.name}: model {number}" + (f" ({called})" if called else "")
    own = _values(table, tuple(_KEYS), where)
    given = [key for key in _SOURCES if key in own]
    if len(given) != 1:
        others = f", not {' and '.join(given)}" if given else ""
        raise ConfigError(f"{where}: give one of {', '.join(_SOURCES)}{others}")
    unfit = _UNFIT.get(given[0], ("shape",))
    if wrong := [key for key in unfit if key in own]:
        raise ConfigError(f"{where}: {wrong[0]} does not go with {given[0]}")
    values = {key: value for key, value in shared.items() if key not in unfit} | own
    if "config" in values:
        values["config"] = path.parent.absolute() / Path(values["config"]).expanduser()
    several = [values.pop(key, (None,)) for key in _ALTERNATIVES]
    for chosen in product(*several):
        one = {key: value for key, value in zip(_ALTERNATIVES, chosen, strict=True) if value is not None}
        yield ManifestModel(where=where, **values, **one)


def _known(table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in allowed:
            hint = meant(key, allowed, f"there are {', '.join(allowed)}")
            raise ConfigError(f"{where}: unknown key {key[:60]!r}; {hint}")


def _values(table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> dict[str, Any]:
    _known(table, allowed, where)
    found = {}
    for key, value in table.items():
        is_right, right = _KEYS[key]
        several = [value] if key in _LISTED and not isinstance(value, list) else value
        if not is_right(several):
            shown = json.dumps(value, default=str, ensure_ascii=False)  # what TOML has, too
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            raise ConfigError(f"{where}: {key} = {shown} is not {right}")
        found[key] = _frozen(several)
    return found


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_whole(value: Any, least: int = 1) -> bool:
    return type(value) is int and value >= least


def _is_size(value: Any) -> bool:
    return _is_text(value) or _is_whole(value)


def _are_sizes(value: Any) -> bool:
    """Whether it is a size, or a list of sizes and of pairs of them."""
    if not isinstance(value, list):
        return _is_size(value)
    return all(len(one) == 2 and all(map(_is_whole, one)) if isinstance(one, list) else _is_size(one) for one in value)


def _are_words(value: Any) -> bool:
    """Whether it lists words, each once."""
    return bool(value) and all(map(_is_text, value)) and len(set(value)) == len(value)


def _choice(*allowed: str) -> tuple[Callable[[Any], bool], str]:
    """Some of these words, and that in words."""
    several = "both" if len(allowed) == 2 else "them"
    return (lambda value: _are_words(value) and set(value) <= set(allowed),
            f"one of {', '.join(allowed)}, or a list of {several}")


_SIZES = (_are_sizes, 'a size, or a list of them such as [1, 8] or ["4x512", 128]')
_FLAG = (lambda value: isinstance(value, bool)), "true or false"
#: What each key of a table takes: what it has to be, and that in words.
_KEYS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_text, "text"),
    "model": (_is_text, 'the name of a preset, such as "llama-3.2-1b"'),
    "config": (_is_text, "the path of a config.json, or of its folder"),
    "module": (_is_text, '"package.module:factory"'),
    "pattern": (_is_text, 'the name of a pattern, such as "swiglu"'),
    "shape": (_is_text, 'a shape such as "32x4096"'),
    "decode": _SIZES,
    "kv_len": (partial(_is_whole, least=2), "a whole number from 2"),
    "prefill": _SIZES,
    "dtype": _choice("bfloat16", "float16", "float32"),
    "layers": (_is_whole, "a whole number from 1"),
    "pack_weights": _FLAG,
    "calls": _FLAG,
    "regime": _choice("eager", "graph"),
    "numerics": _choice("fp32", "eager"),
    "devices": (_are_words, 'a list of devices, such as ["cuda"] or ["h100", "h200"]'),
}
#: What says which model it is; what tables may share; what may be several, for a model each.
_SOURCES = ("model", "config", "module", "pattern")
_SHARED = tuple(key for key in _KEYS if key not in (*_SOURCES, "name", "shape"))
_ALTERNATIVES = ("dtype", "regime", "numerics")
_LISTED = (*_ALTERNATIVES, "devices")
#: What a module, which brings example inputs, and a pattern, which has a shape, do not take.
_UNFIT = {
    "module": ("shape", "decode", "kv_len", "prefill", "layers"),
    "pattern": ("decode", "kv_len", "prefill", "layers", "pack_weights", "calls"),
}
