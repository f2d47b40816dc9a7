"""The actors: mailboxes, the coordinator, one actor per KV group, and the transfer pool."""
