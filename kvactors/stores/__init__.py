"""The stores: the embedded `MemoryStore`, and `FaultyStore` which wraps any of them."""
