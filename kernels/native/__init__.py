"""Native code on this machine: compilers and their limits, folders that code is loaded from, extensions."""
