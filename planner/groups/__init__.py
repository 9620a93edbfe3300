"""Which sets of ops may run together, and the keys of equal ones: regions, legality, enumeration, canonical forms."""
