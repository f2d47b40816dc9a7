"""Deterministic simulation: the real actors on virtual time, with simulated workers and a simulated store.

One seed fixes the schedule, the faults, and so the whole event log.
"""
