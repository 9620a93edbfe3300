"""How busy a fleet of 32 devices is: the tune of shipped models again, each region as a sleep of its recorded time.

    PYTHONPATH=tests/support python tests/checks/check_fleet_efficiency.py [--workers 32] [--models 4] [--least 0.85]

The regions are those of the records that ship with fuseplan, with the seconds that their tunes took. They are spread
by the code that spreads a real tune, over workers that own a device each, in this process; what a worker does is sleep
for a region's time, alone on its device. The records are of one model, on two devices and in two regimes; ``--models``
takes them so often, as models that share no region.

Efficiency is the sum of all recorded times over (workers x the time until the last region is done). No fleet is faster
than its longest region: what that bounds the efficiency to is printed, too. Exits with status 1 where the efficiency is
below ``--least`` and below 95 % of that bound. pytest does not collect it: it takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

import fleet_samples as samples
from fleet_samples import DEVICE, TERMS, fleet

from fuseplan.planner.fleet.terms import RegionTask
from fuseplan.search.store.layered import shipped_files


def recorded() -> list[tuple[float, float]]:
    """Seconds and ops of each whole region, in each regime, that ships."""
    plans, parts = [], set[str]()
    for file in shipped_files():
        for line in file.read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            if "plan_record" in data:
                plans.append(data["plan_record"])
            if data.get("capture", "").startswith("summary/"):
                parts |= {key for one in data["value"]["regions"] for key in one["parts"] if key != one["key"]}
    return [
        (plan["evidence"]["elapsed_s"], float(sum(len(group["ops"]) for group in plan["groups"])))
        for plan in plans if plan["key"]["workload"] not in parts
    ]


def tasks(models: int) -> Iterator[tuple[float, RegionTask]]:
    for model in range(models):
        for number, (seconds, ops) in enumerate(recorded()):
            yield seconds, samples.region(f"{model}.{number}", ops)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--least", type=float, default=0.85)
    given = parser.parse_args()
    log = samples.fresh_log()
    asked = list(tasks(given.models))
    log.seconds = {task.key: seconds for seconds, task in asked}
    total_s, longest_s = sum(log.seconds.values()), max(log.seconds.values())
    bound = min(1.0, total_s / given.workers / longest_s)
    print(f"{len(asked)} regions of {given.models} models, {total_s:.0f} s in all, {longest_s:.1f} s the longest; "
          f"{given.workers} workers")
    with fleet(given.workers) as client:
        spread = samples.spread(client)
        for _, task in asked:
            spread.region(DEVICE, TERMS, task, lambda outcome: None)
        began = time.monotonic()
        spread.run()
        took_s = time.monotonic() - began
    efficiency = total_s / given.workers / took_s
    once = len(log.measured) == len({key for _, key in log.measured}) == len(asked) and log.most_at_once == 1
    print(f"{took_s:.1f} s until the last is done: efficiency {efficiency:.1%} (the longest region bounds it to "
          f"{bound:.1%}); each region once, one at a time on a device: {'yes' if once else 'NO'}")
    return int(not once or efficiency < min(given.least, 0.95 * bound))


if __name__ == "__main__":
    sys.exit(main())
