"""A group of ops becomes a kernel description: values are pulled through views and each op's recipe."""
