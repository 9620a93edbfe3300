"""What libraries offer in the place of ATen's ops: the back ends of attention, matmuls, merged projections."""
