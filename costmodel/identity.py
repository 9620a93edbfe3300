"""Which device this is, exactly: the part of a key that keeps one device's measurements from another's."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from fuseplan.costmodel.devices import KINDS, is_gpu, local_gpu

_GIB = 2**30
_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CACHE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class DeviceIdentity:
    """What makes two devices interchangeable for tuned records; architecture alone does not (H100 and H200 share it).

    Attributes:
        name: Marketing name; CPUs add family and model, because virtual machines hide them behind a generic name.
        cores: Streaming multiprocessors, or the threads PyTorch uses on a CPU.
        l2_bytes: Last-level cache (0 where the system does not tell).
        memory_bytes: Rounded to GiB because drivers reserve slightly different amounts; 0 on CPUs, where a virtual
            machine may grow its memory while it runs.
    """

    device_type: str
    name: str
    cores: int
    l2_bytes: int
    memory_bytes: int

    @property
    def is_gpu(self) -> bool:
        return is_gpu(self.device_type)

    def key(self) -> str:
        """Exact, readable database key: a slug of the name plus a hash of every field.

        >>> DeviceIdentity("cuda", "NVIDIA H200", 132, 52428800, 150323855360).key()
        'cuda-nvidia-h200-4702ed953224'
        """
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        fields = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return f"{self.device_type}-{slug}-{hashlib.sha256(fields.encode()).hexdigest()[:12]}"


def current_identity(device_type: str) -> DeviceIdentity:
    """Identity of this machine's processor, or of the current GPU; ValueError where there is no such device."""
    import torch

    if device_type not in KINDS:
        raise ValueError(f"unknown device_type {device_type!r}; known: {', '.join(map(repr, KINDS))}")
    if is_gpu(device_type):
        properties = local_gpu()
        memory_bytes = round(properties.total_memory / _GIB) * _GIB
        return DeviceIdentity(
            device_type, properties.name, properties.multi_processor_count, properties.L2_cache_size, memory_bytes
        )
    cache_bytes = max((parse_cache_bytes(path.read_text()) for path in _CACHES.glob("index*/size")), default=0)
    name = parse_cpu_name(_CPUINFO.read_text(errors="replace")) if _CPUINFO.exists() else None
    name = name or platform.processor() or platform.machine()
    return DeviceIdentity(device_type, name, torch.get_num_threads(), cache_bytes, 0)


def current_versions(device_type: str) -> dict[str, str]:
    """Versions that a measurement depends on: Python, torch, the platform, and CUDA's where it is used."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}
    if is_gpu(device_type) and torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return versions


def parse_cpu_name(cpuinfo: str) -> str | None:
    """Model name, family and model number from the text of ``/proc/cpuinfo``; None where it names no model."""
    fields: dict[str, str] = {}
    for name, value in re.findall(r"^([^:\n]*):(.*)$", cpuinfo, re.MULTILINE):
        fields.setdefault(name.strip(), value.strip())
    if "cpu family" in fields and "model" in fields and "model name" in fields:
        return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"
    return fields.get("model name")


def parse_cache_bytes(size: str) -> int:
    """Bytes of a sysfs cache size such as ``32768K``; 0 for anything else."""
    match = re.fullmatch(r"(\d+)([KMG]?)", size.strip())
    return int(match[1]) * _CACHE_UNITS[match[2]] if match else 0
