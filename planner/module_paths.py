"""Where in a model ops are, for people alone: module paths as the user spells them, and a group's place in words.

>>> place([["model.layers.0.input_layernorm", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]])
'model.layers.0: input_layernorm -> self_attn.q_proj, k_proj'
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import TypeAlias

#: Module paths of some ops, in the order in which they run; ``""`` is the model itself.
Paths: TypeAlias = Sequence[str]

#: How Dynamo names what a module was found in: ``L['self']``, ``G['model']``, ``L['args'][0]``.
_ROOT = re.compile(r"[LG]\[(['\"])(?P<name>.*?)\1\](?P<item>\[\d+\])?")
#: Roots that Dynamo names itself, for the object whose method it traces.
_OWN_ROOTS = frozenset({"self", "args[0]"})
#: What wraps a module and is not spelled by its user.
_WRAPPERS = frozenset({"_orig_mod", "_modules"})
#: Digits of a module in a ModuleList or a Sequential.
_NUMBER = re.compile(r"[0-9]{1,9}")
#: A number in a pattern that differs between repetitions, and how far it is ahead of others.
_STAR = re.compile(r"\*(?P<ahead>[+-][0-9]{1,9})?")
#: Where the ops of a place are the model's own, or a module's own beside its children's.
TOP, ITSELF = "(top level)", "(itself)"
#: Modules of a place, and places of a group, that are spelled out; the rest is counted.
_MOST_MODULES, _MOST_PLACES = 6, 3


def user_paths(names: Iterable[str]) -> dict[str, str]:
    """The user's own spelling of a graph's modules, by Dynamo's or ``torch.export``'s.

    A root is left out unless there are several and the user named it: ``encoder.layers.0`` and ``decoder.layers.0``.
    >>> user_paths(["L['self'].layers[0].up", "L['self'].experts['a']"])
    {"L['self'].layers[0].up": 'layers.0.up', "L['self'].experts['a']": 'experts.a'}
    """
    split = {name: _split(name) for name in names}
    keeps_roots = len({root for root, _ in split.values()}) > 1
    return {
        name: ".".join(([root] if keeps_roots and root not in _OWN_ROOTS else []) + parts if root else parts)
        for name, (root, parts) in split.items()
    }


def _split(name: str) -> tuple[str, list[str]]:
    """The root of a module's name, ``""`` where it has none, and the parts of its path."""
    root = ""
    if found := _ROOT.match(name):
        root, item, name = found["name"], found["item"] or "", name[found.end() :]
        if root + item in _OWN_ROOTS:
            root += item
        else:  # the models in a user's list are told apart
            name = item + name
    name = re.sub(r"\[(['\"]?)(.*?)\1\]", r".\2", name)
    return root, [part for part in name.split(".") if part and part not in _WRAPPERS]


def patterns(occurrences: Sequence[Paths]) -> list[tuple[int, list[str]]]:
    """The paths of a region's ops over its repetitions, as patterns, with how often each occurs.

    A number that differs between repetitions is ``*``, or ``*+1`` where it is always that much larger than the first
    ``*`` of the same list of modules.

    >>> patterns([["layers.0", "layers.1.norm"], ["layers.1", "layers.2.norm"]])
    [(2, ['layers.*', 'layers.*+1.norm'])]
    """
    alike: dict[tuple[tuple[str, ...], ...], list[Paths]] = {}
    for paths in occurrences:
        shape = tuple(tuple("*" if _NUMBER.fullmatch(part) else part for part in path.split(".")) for path in paths)
        alike.setdefault(shape, []).append(paths)
    return [(len(group), _pattern(group)) for group in alike.values()]


def _pattern(group: Sequence[Paths]) -> list[str]:
    """One spelling of paths that differ in numbers alone."""
    first: dict[tuple[str, ...], list[int]] = {}
    found = []
    for same in zip(*group, strict=True):
        written: list[str] = []
        for parts in zip(*(path.split(".") for path in same), strict=True):
            if len(set(parts)) == 1:
                written.append(parts[0])
                continue
            numbers = list(map(int, parts))
            known = first.setdefault(tuple(written), numbers)
            ahead = {number - base for number, base in zip(numbers, known, strict=True)}
            written.append(f"*{ahead.pop():+d}" if len(ahead) == 1 and ahead != {0} else "*")
        found.append(".".join(written))
    return found


@dataclass(frozen=True)
class RepeatedPaths:
    """Where a region's ops are: one pattern (:func:`patterns`) that ``times`` repetitions share.

    ``paths`` has an op's position in the region, and the pattern of its path, in running order; views are left out.
    """

    times: int
    paths: tuple[tuple[int, str], ...]

    def part(self, ops: Collection[int]) -> tuple[int, list[str]]:
        """How often a group of these ops is there, and its paths: what :func:`joined_places` takes."""
        return self.times, [path for at, path in self.paths if at in ops]


def group_place(found: Iterable[RepeatedPaths], ops: Collection[int]) -> str:
    """The place of a group, given by positions in its region, in all repetitions; ``""`` where none is known."""
    return joined_places(one.part(ops) for one in found)


def place(occurrences: Sequence[Paths]) -> str:
    """The place of a group in words, from the paths of its ops in each of its repetitions; ``""`` where none is known.

    After the prefix of all modules come these in running order: commas join those of one parent, arrows others.
    >>> place([[f"layers.{n}.mlp.gate_proj", f"layers.{n}.mlp.act_fn", f"layers.{n}.mlp"] for n in range(32)])
    'layers.*.mlp: gate_proj, act_fn -> (itself)  x32'
    """
    return joined_places(patterns(occurrences))


def located(name: str, where: str) -> str:
    """A name with the place of what it names, where there is one: ``silu 1x64 (layers.0.mlp.act_fn)``."""
    return f"{name} ({where})" if where not in ("", TOP) else name


def joined_places(found: Iterable[tuple[int, Paths]]) -> str:
    """The place of a group from the patterns of its paths, with how often each occurs, the most frequent first.
    >>> joined_places([(2, ["layers.*+1.mlp"]), (1, ["layers.0.mlp"]), (1, ["norm"])])
    'layers.*.mlp  x3; norm'
    """
    repeated, single = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for count, paths in found:
        written = tuple(_rebased(dict.fromkeys(paths)))
        (repeated if any("*" in path for path in written) else single)[written] += count
    left: list[tuple[str, ...]] = []
    for one, count in single.items():
        if pattern := next((pattern for pattern in repeated if _stands_for(pattern, one)), None):
            repeated[pattern] += count
        else:
            left += [one] * count
    times = Counter[str]()
    for count, each in [*((count, pattern) for pattern, count in repeated.items()), *patterns(left)]:
        times[_one_place(each)] += count
    del times[""]
    ranked = times.most_common()
    texts = [text if count == 1 else f"{text}  x{count}" for text, count in ranked[:_MOST_PLACES]]
    if more := sum(count for _, count in ranked[_MOST_PLACES:]):
        texts.append(f"and {more} more")
    return "; ".join(texts)


def _rebased(paths: Iterable[str]) -> list[str]:
    """Patterns of a part of a region, whose first number of each list of modules is ``*`` itself."""
    first: dict[str, int] = {}

    def star(found: re.Match[str]) -> str:
        ahead = int(found["ahead"] or 0)
        ahead -= first.setdefault(found.string[: found.start()], ahead)
        return f"*{ahead:+d}" if ahead else "*"

    return [_STAR.sub(star, path) for path in paths]


def _stands_for(pattern: Paths, paths: Paths) -> bool:
    spelled = (r"[0-9]+".join(map(re.escape, re.split(r"\*(?:[+-][0-9]+)?", path))) for path in pattern)
    return re.fullmatch("\n".join(spelled), "\n".join(paths)) is not None


def _one_place(paths: Paths) -> str:
    modules = _ranges([path.split(".") if path else [] for path in dict.fromkeys(paths)])
    if not modules:
        return ""
    if len(modules) == 1:
        return ".".join(modules[0]) or TOP
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    prefix = [parts[0] for parts in shared]
    # A bare number says little: the list that it counts stands beside it.
    while prefix and any(_counts(part) for parts in modules for part in parts[len(prefix) : len(prefix) + 1]):
        prefix.pop()
    inner = [parts[len(prefix) :] for parts in modules]
    named = []
    # What is no module below the prefix, the prefix itself, has no parent that others could share.
    for parent, siblings in groupby(inner[:_MOST_MODULES], lambda parts: parts[:-1] if parts else None):
        names = [parts[-1] if parts else ITSELF if prefix else TOP for parts in siblings]
        named.append(".".join([*(parent or []), names[0]]) + "".join(f", {name}" for name in names[1:]))
    more = len(inner) - _MOST_MODULES
    text = " -> ".join(named) + (f" and {more} more" if more > 0 else "")
    return f"{'.'.join(prefix)}: {text}" if prefix else text


def _counts(part: str) -> bool:
    """Whether a part of a path is a number, some numbers, or any."""
    return part[:1] in ("*", *"0123456789")


def _ranges(modules: Sequence[list[str]]) -> list[list[str]]:
    """The modules, with one ``0-7`` for those that differ in one number alone, which counts up."""
    found: list[list[str]] = []
    for parts in modules:
        last = found[-1] if found else []
        differ = [at for at, (a, b) in enumerate(zip(last, parts, strict=False)) if a != b]
        if len(last) == len(parts) and len(differ) == 1 and _NUMBER.fullmatch(parts[differ[0]]):
            first, _, end = last[differ[0]].partition("-")
            if _NUMBER.fullmatch(end or first) and int(end or first) + 1 == int(parts[differ[0]]):
                found[-1] = [*last[: differ[0]], f"{first}-{parts[differ[0]]}", *last[differ[0] + 1 :]]
                continue
        found.append(parts)
    return found
