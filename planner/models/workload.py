"""What is run: the regimes of inference, with their sizes as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from fuseplan.costmodel.devices import ByDevice
from fuseplan.planner.errors import Argument, ShapeError

#: decode: one new token per sequence against a static KV cache. prefill: whole sequences, no cache.
#: forward: the example inputs that the user's own module came with.
#: generate: the calls that Hugging Face's ``generate()`` makes of a prompt, with masks and caches of its own.
Stage: TypeAlias = Literal["decode", "prefill", "forward", "generate"]
#: What a call is given beside its tokens: a mask of two dimensions, as a tokenizer makes one; position ids; or, in
#: place of the tokens, embeddings. The last two want no logits but the last. What a model does not take is left out.
Given: TypeAlias = Literal["", "masked", "positions", "embeddings"]


@dataclass(frozen=True)
class Workload:
    """One set of sizes to plan for.

    Attributes:
        batch: Sequences.
        seq: New tokens per sequence (1 in decode); of ``generate``, tokens of the prompt.
        kv_len: Length of the static KV cache; 0 without one (``generate`` then has one that grows).
        given: What the call has beside its tokens.
    """

    regime: Stage
    batch: int = 1
    seq: int = 1
    kv_len: int = 0
    given: Given = ""

    @property
    def derived(self) -> bool:
        """Whether it follows from sizes given for other calls (:func:`with_calls`)."""
        return bool(self.given) or self.regime == "generate"

    @property
    def label(self) -> str:
        """Short name for tables: ``decode 8 @ 1024``, ``prefill 4x2048 masked``, ``generate 1x128 @ 256``."""
        if self.regime == "forward":
            return "forward"
        size = f"{self.batch}" if self.regime == "decode" else f"{self.batch}x{self.seq}"
        cache = f" @ {self.kv_len}" if self.kv_len else ""
        return f"{self.regime} {size}{cache}{self.given and f' {self.given}'}"


def decode(batch: int, kv_len: int) -> Workload:
    return Workload("decode", batch, 1, kv_len)


def prefill(batch: int, seq: int) -> Workload:
    return Workload("prefill", batch, seq)


def generate(batch: int, seq: int, kv_len: int = 0) -> Workload:
    return Workload("generate", batch, seq, kv_len)


def with_calls(workloads: Iterable[Workload], generates: bool) -> tuple[Workload, ...]:
    """The workloads, and what :data:`Given` arguments and ``generate()`` make of the same sizes.

    Masks of four dimensions and other combinations need no call of their own: they are made of the same regions. A
    prompt that fits a decode's cache goes through it; a decode without such a prefill is reached from one token.

    >>> calls = with_calls([decode(1, 256), prefill(1, 128)], True)
    >>> [one.label for one in calls[2:5]]
    ['decode 1 @ 256 masked', 'prefill 1x128 masked', 'decode 1 @ 256 positions']
    >>> [one.label for one in calls[5:]]
    ['prefill 1x128 positions', 'prefill 1x128 embeddings', 'generate 1x128', 'generate 1x128 @ 256']
    """
    plain = tuple(workloads)
    prefills = [one for one in plain if one.regime == "prefill"]
    if not generates:
        return tuple(dict.fromkeys((*plain, *(replace(one, given="masked") for one in prefills))))
    found = [*plain, *(replace(one, given="masked") for one in plain)]
    found += [replace(one, given="positions") for one in plain]
    found += [replace(one, given="embeddings") for one in prefills]
    found += [generate(one.batch, one.seq) for one in prefills]
    for step in plain:
        if step.regime == "decode":
            fitting = [one.seq for one in prefills if one.batch == step.batch and one.seq < step.kv_len]
            found += [generate(step.batch, seq, step.kv_len) for seq in fitting or [1]]
    return tuple(dict.fromkeys(found))


#: Without flags: on a CPU small enough to tune in minutes, on a GPU what serving looks like.
_DEFAULTS = ByDevice(cpu=("1,8", 256, "1x128"), gpu=("1,8,16,64", 1024, "512,2048,4x2048"))


def parse_workloads(
    device_type: str, decode_batches: str | None = None, kv_len: int | None = None, prefills: str | None = None
) -> tuple[Workload, ...]:
    """Workloads as text, decode first: batch sizes (``"1,8"``), and lengths or batch x length (``"512,4x2048"``).

    The device's defaults stand in where neither list is given; where one is, the other is empty. ShapeError where a
    size is no positive number, or nothing is left to plan.

    >>> [workload.label for workload in parse_workloads("cpu", "1,8", 512, "4x128")]
    ['decode 1 @ 512', 'decode 8 @ 512', 'prefill 4x128']
    """
    default_decode, default_kv_len, default_prefill = _DEFAULTS.on(device_type)
    if decode_batches is None and prefills is None:
        decode_batches, prefills = default_decode, default_prefill
    length = default_kv_len if kv_len is None else kv_len
    if length < 2:
        raise ShapeError("{} {}: the cache must hold at least 2 tokens", Argument("kv_len"), length)
    fits(length, Argument("kv_len"), str(length))
    found = [decode(read_size(item, Argument("decode"), "1,8,32"), length) for item in _items(decode_batches)]
    for item in _items(prefills):
        sizes = [read_size(size, Argument("prefill"), "512,4x2048", item) for size in item.split("x", 1)]
        found.append(prefill(sizes[0] if len(sizes) == 2 else 1, sizes[-1]))
    if not found:
        raise ShapeError("nothing to plan: give {} 1,8 or {} 4x2048", Argument("decode"), Argument("prefill"))
    for workload in found:
        fits(workload.batch * max(workload.seq, workload.kv_len), workload.label, "batch x length")
    return tuple(dict.fromkeys(found))


def _items(text: str | None) -> list[str]:
    """What a list has between its commas; nothing of an empty one."""
    return [item.strip() for item in text.split(",")] if text and text.strip() else []


#: The largest size of anything.
LARGEST = 2**31 - 1


def read_size(text: str, where: str, example: str, whole: str | None = None) -> int:
    """A size up to :data:`LARGEST` in ASCII digits; else a ShapeError with ``where`` it is given and an ``example``.

    The error quotes the ``whole`` of which the size is a part.
    """
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        shown = text if whole is None else whole
        raise ShapeError("{}: {!r} is no positive size; write it like {}", where, shown, example)
    return fits(int(text) if len(text) < 20 else LARGEST + 1, where, text)


def fits(size: int, where: str, text: str) -> int:
    """The size, or the number of rows that several make together; :class:`ShapeError` where that is too large."""
    if size > LARGEST:
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        raise ShapeError("{}: {} is more than {}, the largest size there is", where, shown, LARGEST)
    return size
