"""The pages that we write, looked at in a real browser."""
