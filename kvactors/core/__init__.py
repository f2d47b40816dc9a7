"""Pure decisions: layouts, keys, sessions, coverage, reachability, planning. No I/O, clock, thread or torch in here."""
