"""Small graphs that inference engines fuse by hand, by name: for tests, benches and as tuning shortcuts."""
