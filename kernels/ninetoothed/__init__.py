"""The ninetoothed back end: a kernel description as a ninetoothed module."""
