"""A kernel that writes right behind the end of a tensor: memcheck has to see it, or its silence means nothing.

    compute-sanitizer ... python tests/support/sanitize_control.py here|worker

``worker`` has a worker of the search run it, which is killed in the end, as it is after a tune.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def store(out, index):  # type: ignore[no-untyped-def]
    tl.store(out + index, 1.0)


def beyond() -> None:
    """Write element 5 of 5."""
    store[(1,)](torch.zeros(5, device="cuda"), 5)
    torch.cuda.synchronize()


def main(where: str) -> None:
    if where == "here":
        beyond()
        return
    import sanitize_control  # by its own name: a worker cannot import from this process's __main__

    from fuseplan.search.workers.worker import WorkerPool

    with WorkerPool(compilers=1) as pool:
        print(pool.call(sanitize_control.beyond, limit_s=120.0))


if __name__ == "__main__":
    main(sys.argv[1])
