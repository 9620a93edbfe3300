"""TorchInductor as a peer: its generated program alone."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

#: Options of ``torch.compile``'s max-autotune mode without its CUDA graphs, which the bench adds itself.
_MAX_AUTOTUNE: Mapping[str, Any] = {
    "max_autotune": True, "coordinate_descent_tuning": True, "triton.cudagraphs": False,
    "autotune_num_choices_displayed": 0,
}


def inductor_callable(chain: fx.GraphModule, inputs: Sequence[torch.Tensor], max_autotune: bool) -> Callable[..., Any]:
    """TorchInductor's generated program for a chain of ops, called as its own compiled graphs call it.

    That is the innermost callable: Dynamo's guards and AOTAutograd's wrapper, which a model pays once however many
    groups it has, are not charged to the group. Ours is measured the same way.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    programs: list[Callable[..., Any]] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        programs.append(compile_fx_inner(*args, **kwargs))
        return programs[-1]

    options = dict(_MAX_AUTOTUNE) if max_autotune else {}
    compiled: Any = compile_fx(copy.deepcopy(chain), list(inputs), inner_compile=inner, config_patches=options)
    whole: Callable[..., Any] = compiled
    expected = whole(*inputs)
    if len(programs) != 1 or not _same(programs[0](list(inputs)), expected):
        return whole  # the calling convention is not the plain one for this chain
    program = programs[0]
    return lambda *operands: program(list(operands))


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Keep what TorchInductor prints of each matmul it tunes, and of choices that do not fit, off the terminal."""
    log = logging.getLogger("torch._inductor.select_algorithm")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(level)


def _same(outputs: Any, expected: Any) -> bool:
    # The float8 types have no comparison of their own.
    return len(outputs) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a.double(), b.double()) for a, b in zip(outputs, expected, strict=True)
    )
