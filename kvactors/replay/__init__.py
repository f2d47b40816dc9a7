"""Replay of recorded request traces through the real engine, with real bytes."""
