"""The kernel back ends this package has, by device."""

from __future__ import annotations

from fuseplan.costmodel.devices import KINDS, is_cpu, is_gpu, local_architecture, local_gpu
from fuseplan.kernels.ir.backend import Backend, Config, Target, gpu_target, misfit


def backends_for(device_type: str) -> tuple[Backend, ...]:
    """Every back end for a kind of device, in order of preference, whether or not it can run here."""
    if is_gpu(device_type):
        from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
        from fuseplan.kernels.triton.backend import TritonBackend

        return (TritonBackend(), NinetoothedBackend())
    if is_cpu(device_type):
        from fuseplan.kernels.cpp.backend import CppBackend

        return (CppBackend(),)
    raise ValueError(f"no kernel back ends for device type '{device_type}'; known: {', '.join(KINDS)}")


def malformed_config(backend: str, config: Config) -> str | None:
    """Why no kernel of a back end can have been built with a config, None when one can, or the back end is unknown."""
    known = {one.name: one.parameters for kind in KINDS for one in backends_for(kind)}
    return misfit(config, known[backend], complete=False) if backend in known else None


def local_target(device_type: str) -> Target:
    """What to compile for on this machine; ``NoDeviceError`` where a GPU is asked for and there is none."""
    import torch

    if not is_gpu(device_type):
        return Target(device_type, "native", torch.get_num_threads())
    gpu = local_gpu()
    return gpu_target(local_architecture().name, gpu.multi_processor_count, gpu.L2_cache_size)
