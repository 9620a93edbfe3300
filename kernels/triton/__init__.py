"""The Triton back end: a kernel description as a Triton module, and the configurations of one."""
