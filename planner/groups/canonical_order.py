"""Colour refinement on a directed acyclic graph with tagged arcs, and the topological order it determines."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b


class Colouring:
    """Vertices with colours (digests) that are refined by their neighbours'; every arc leads to a larger number."""

    def __init__(self, labels: Iterable[str]) -> None:
        self.colour: list[bytes] = [_digest(label.encode()) for label in labels]
        self.incoming: list[list[tuple[bytes, int]]] = [[] for _ in self.colour]
        self.outgoing: list[list[tuple[bytes, int]]] = [[] for _ in self.colour]

    def arc(self, start: int, end: int, tag: str) -> None:
        self.incoming[end].append((tag.encode(), start))
        self.outgoing[start].append((tag.encode(), end))

    def refine(self) -> None:
        """Sweep along and against the arcs until the number of colours stops growing."""
        colours = 0
        while colours < len(self.colour):
            for vertex in range(len(self.colour)):
                self._absorb(vertex, self.incoming)
            for vertex in reversed(range(len(self.colour))):
                self._absorb(vertex, self.outgoing)
            found = len(set(self.colour))
            if found == colours:
                return
            colours = found

    def _absorb(self, vertex: int, arcs: list[list[tuple[bytes, int]]]) -> None:
        near = arcs[vertex]
        if near:
            colour = self.colour
            parts = sorted([tag + b"|" + colour[other] for tag, other in near])
            colour[vertex] = _digest(colour[vertex] + b"".join(parts))

    def topological_order(self, first: int) -> list[int]:
        """Vertices from ``first`` on, counted from there: of those that are ready, the one with the smallest colour."""
        waiting = [sum(start >= first for _, start in self.incoming[v]) for v in range(len(self.colour))]
        ready = [(self.colour[v], v) for v in range(first, len(self.colour)) if not waiting[v]]
        heapq.heapify(ready)
        population = Counter(self.colour)
        placed: dict[int, None] = {}
        while ready:
            colour, vertex = heapq.heappop(ready)
            if vertex in placed or colour != self.colour[vertex]:
                continue
            placed[vertex] = None
            if population[colour] > 1:
                changed = self._single_out(vertex, population)
                for other in changed:
                    if other >= first and not waiting[other] and other not in placed:
                        heapq.heappush(ready, (self.colour[other], other))
            for _, end in self.outgoing[vertex]:
                waiting[end] -= 1
                if not waiting[end]:
                    heapq.heappush(ready, (self.colour[end], end))
        return [vertex - first for vertex in placed]

    def _single_out(self, vertex: int, population: Counter[bytes]) -> set[int]:
        """Give ``vertex`` a colour of its own, then split the colours of its neighbours for as long as any splits."""
        self._recolour({vertex: _digest(self.colour[vertex] + b"first")}, population)
        changed, front = {vertex}, {vertex}
        while front:
            near = {other for v in front for _, other in (*self.incoming[v], *self.outgoing[v])}
            touched = {other for other in near if population[self.colour[other]] > 1}
            proposals: dict[bytes, dict[int, bytes]] = {}
            for other in touched:
                proposals.setdefault(self.colour[other], {})[other] = self._neighbourhood(other)
            front = set()
            for colour, members in proposals.items():
                if len(members) < population[colour] or len(set(members.values())) > 1:
                    front |= members.keys()
            self._recolour({v: self._neighbourhood(v) for v in front}, population)
            changed |= front
        return changed

    def _neighbourhood(self, vertex: int) -> bytes:
        parts = [self.colour[vertex]]
        for arcs in (self.incoming[vertex], self.outgoing[vertex]):
            parts.append(b"/")
            parts += sorted([tag + b"|" + self.colour[other] for tag, other in arcs])
        return _digest(b"".join(parts))

    def _recolour(self, colours: dict[int, bytes], population: Counter[bytes]) -> None:
        for vertex, colour in colours.items():
            population[self.colour[vertex]] -= 1
            population[colour] += 1
            self.colour[vertex] = colour


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=12).digest()
