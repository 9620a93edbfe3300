"""Kernels written by hand that order the elements of short rows."""
