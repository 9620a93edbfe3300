"""``python -m fuseplan.planner``: the ``plan`` command, where its script is not on the path."""

from __future__ import annotations

from fuseplan.planner.cli.main import main

if __name__ == "__main__":
    main()
