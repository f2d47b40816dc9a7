"""Makes the sample trace that ships with kvactors: chats over a few shared system prompts, several turns each.

    python examples/make_sample_trace.py > examples/sample_trace.jsonl

The format is Mooncake's: one id per 512 prompt tokens, and an id stands for all tokens up to the end of its block. Here an
id is drawn whenever a conversation first reaches a block; a later turn of it starts with the same ids. A last, partly
filled block has an id of its own, because the next turn fills it with other tokens. The seed is fixed.
"""

from __future__ import annotations

import json
import random
import sys

BLOCK_TOKENS = 512
SYSTEM_PROMPTS = (600, 1536, 2100, 4096)
CONVERSATIONS = 110
MINUTES = 10


def main() -> None:
    rng = random.Random(20250601)
    ids = iter(range(1 << 62))
    system_ids = [[next(ids) for _ in range(tokens // BLOCK_TOKENS)] for tokens in SYSTEM_PROMPTS]
    rows = []
    for _ in range(CONVERSATIONS):
        which = rng.choices(range(len(SYSTEM_PROMPTS)), weights=(5, 3, 2, 1))[0]
        known = list(system_ids[which])  # ids of the blocks that are full so far
        tokens = SYSTEM_PROMPTS[which]
        at_ms = rng.uniform(0, MINUTES * 60_000)
        for _ in range(rng.choice((1, 2, 2, 3, 4, 6))):
            tokens += int(rng.lognormvariate(5.8, 1.1)) + 8
            output = int(rng.lognormvariate(5.2, 0.8)) + 1
            while len(known) < tokens // BLOCK_TOKENS:
                known.append(next(ids))
            partial = [next(ids)] if tokens % BLOCK_TOKENS else []
            rows.append({"timestamp": int(at_ms), "input_length": tokens, "output_length": output, "hash_ids": known + partial})
            tokens += output
            at_ms += output * 20 + rng.expovariate(1 / 15_000)
    for row in sorted(rows, key=lambda row: row["timestamp"]):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
