"""Tuning one group: its space of configurations, what to try next, the decision, and the record of it."""
