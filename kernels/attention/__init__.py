"""Attention kernels, written by hand in Triton: no kernel description has two matmuls in a row."""
