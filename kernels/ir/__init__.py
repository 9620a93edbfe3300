"""What a kernel is, as data, whatever machine runs it; and the contract of the back ends that make one."""
