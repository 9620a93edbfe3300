"""``plan bench``: one file for each kind of what it measures."""
