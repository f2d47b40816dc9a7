"""Benchmarks: what kvactors does beside the plainest way to do the same, measured in one run."""
