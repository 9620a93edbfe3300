"""Measuring a device: the samples that a device's spec is fitted to, and the clocks they are taken with."""
