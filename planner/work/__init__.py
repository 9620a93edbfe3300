"""What a group moves and computes: exact counts, from a kernel's description or from an op's sizes."""
