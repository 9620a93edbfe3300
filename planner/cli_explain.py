"""``plan explain``."""
def explain() -> None:
    """todo"""
