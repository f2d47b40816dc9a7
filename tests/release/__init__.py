"""What we ship: built twice, looked into, and installed."""
