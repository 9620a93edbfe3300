"""The CPU back end: a kernel description as C++."""
