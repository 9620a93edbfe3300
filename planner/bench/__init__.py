"""Measurements to publish: our plans beside their peers in one run."""
