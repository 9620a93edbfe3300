"""Where things lie in the checkout, for tests that start scripts or look at files."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
CHECKS = SUPPORT.parent / "checks"
ROOT = SUPPORT.parent.parent
