"""``plan bench``."""
def bench() -> None:
    """todo"""
