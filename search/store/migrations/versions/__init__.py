"""One step each, in the order of their numbers. A step that was released is never changed."""
