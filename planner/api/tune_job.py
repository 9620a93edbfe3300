"""The models of a manifest that are tuned together on one device, under names that keep their reports apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fuseplan.costmodel.devices import Kind, is_cpu
from fuseplan.planner.api.request import Asked, asked_for
from fuseplan.planner.errors import ConfigError, FuseplanError, NothingForDeviceError
from fuseplan.planner.models.manifest import Manifest, ManifestModel


@dataclass(frozen=True)
class TuneJob:
    """What is tuned together on one device.

    Attributes:
        title: What the whole is called.
        left_out: Models that are not tuned on this device, and why.
    """

    title: str
    models: tuple[Asked, ...]
    left_out: tuple[tuple[str, str], ...] = ()


def manifest_job(manifest: Manifest, kind: Kind, device: str) -> TuneJob:
    """The models of a manifest that are for a device, by its key; nothing is captured yet.

    Raises:
        ConfigError: A model cannot be planned as it is asked for, or is there twice. The message names file and table.
        NothingForDeviceError: None is for this device.
    """
    models: list[tuple[ManifestModel, Asked]] = []
    left_out: list[tuple[str, str]] = []
    for one in manifest.models:
        if not one.is_for(device):
            left_out.append((one.source, f"it is for {', '.join(one.devices)}"))
        elif one.regime == "graph" and is_cpu(kind):
            left_out.append((one.source, "it is for CUDA graphs, which a CPU does not have"))
        else:
            models.append((one, _asked(one, kind)))
    if not models:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out)
        raise NothingForDeviceError(f"{manifest.path.name}: no model is for this device, {device} ({reasons})")
    return TuneJob(manifest.path.name, tuple(_named_apart(models)), tuple(left_out))


def _asked(one: ManifestModel, kind: Kind) -> Asked:
    try:
        asked = asked_for(kind, one)
    except FuseplanError as error:
        raise ConfigError(f"{one.where}: {error}") from None
    return replace(asked, label=one.name or asked.label)


def _named_apart(models: Sequence[tuple[ManifestModel, Asked]]) -> Iterator[Asked]:
    """The models under names that keep their reports apart: those of several dtypes have these in their names.

    ConfigError where two are the same, or where different ones are called the same.
    """
    known: dict[object, ManifestModel] = {}
    dtypes: defaultdict[str, set[str | None]] = defaultdict(set)
    for table, one in models:
        same = known.setdefault((_made_from(table, one), table.shape, one.workloads, one.pack_weights,
                                 one.settings), table)
        if same is not table:
            raise ConfigError(f"{table.where}: {_number(same)} asks for the same; leave one of them out")
        dtypes[one.label].add(_dtype(table, one))
    called: dict[str, tuple[object, ManifestModel]] = {}
    for table, one in models:
        label = one.label
        label = label if len(dtypes[label]) == 1 else f"{label}:{_dtype(table, one)}"
        what, other = called.setdefault(label, (_made_from(table, one), table))
        if what != _made_from(table, one):
            raise ConfigError(f"{table.where}: {_number(other)} is called {label}, too; give one of them a name")
        yield replace(one, label=label)


def _made_from(table: ManifestModel, one: Asked) -> object:
    """What a model is, wherever its file is."""
    source = one.source
    if source is None:
        return table.pattern, table.dtype
    return replace(source, name="") if source.config_json else source


def _dtype(table: ManifestModel, one: Asked) -> str | None:
    return one.source.dtype if one.source is not None else table.dtype


def _number(table: ManifestModel) -> str:
    return table.where.partition(": ")[2]
