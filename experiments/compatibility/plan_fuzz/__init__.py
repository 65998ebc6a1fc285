"""Random combinations of everything the runtime can do, on real processes: see `__main__`."""
