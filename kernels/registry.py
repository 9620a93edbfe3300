"""The kernel back ends this package has, by device."""

from __future__ import annotations

from fuseplan.kernels.ir.backend import Backend, Config, Target, misfit


def backends_for(device_type: str) -> tuple[Backend, ...]:
    """Every back end for ``"cpu"`` or ``"cuda"``, in order of preference, whether or not it can run here."""
    if device_type == "cpu":
        from fuseplan.kernels.cpp.backend import CppBackend

        return (CppBackend(),)
    if device_type == "cuda":
        from fuseplan.kernels.ninetoothed.backend import NinetoothedBackend
        from fuseplan.kernels.triton.backend import TritonBackend

        return (TritonBackend(), NinetoothedBackend())
    raise ValueError(f"no kernel back ends for device type '{device_type}'; known: cpu, cuda")


def malformed_config(backend: str, config: Config) -> str | None:
    """Why no kernel of a back end can have been built with a config, None when one can, or the back end is unknown."""
    from fuseplan.kernels.cpp import config as cpp_config
    from fuseplan.kernels.triton import config as triton_config

    known = {"cpp": cpp_config.PARAMETERS, "triton": triton_config.PARAMETERS, "ninetoothed": triton_config.PARAMETERS}
    return misfit(config, known[backend], complete=False) if backend in known else None


def local_target(device_type: str) -> Target:
    """What to compile for on this machine; RuntimeError where ``"cuda"`` is asked for and there is no CUDA device."""
    import torch

    if device_type == "cpu":
        return Target("cpu", "native", torch.get_num_threads())
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is visible; use --device cpu, or check the driver with nvidia-smi")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = f"sm_{properties.major}{properties.minor}"
    return Target("cuda", arch, properties.multi_processor_count, properties.L2_cache_size)
