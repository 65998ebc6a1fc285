"""Profiles: measured profiles and the hardware catalog, as data (read with importlib.resources)."""

# One name for one place: with a bare name, which folder is read would depend on where Python was started.
if __name__ == "profiles":
    raise ImportError("the profiles are read through autoplan.profiles, not profiles")
