"""Python runs this as it starts: ``tests/conftest.py`` names this folder to the processes that tests start.

They import PyTorch, and looking for garbage among what is imported would take an eighth of their time.
"""

import gc

gc.set_threshold(50_000, 20, 20)  # as a command's (``planner/cli/main.py``)
