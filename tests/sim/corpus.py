"""Seeds that found a bug once, with what it was. The seeds' draws may change with the simulator; they stay as they are."""

from __future__ import annotations

from kvactors.simulate.run import scenario

CORPUS = [
    scenario(18, "evicting"),  # a request that failed on a later layer was reported loaded on a skipped earlier one
    scenario(12, "flaky-store"),  # a key whose clean-up revoke failed was opened a second time
    scenario(329, "flaky-store"),  # a revoke's short answer counted as done
    scenario(1, "lost-master"),  # a commit queued before the loss was made after it
    scenario(0, "slow-store"),  # the end of a step waited for a queue of slow calls beyond every deadline
    scenario(4, "slow-store"),  # a late open closed the session of a later owner
    scenario(48, "slow-store"),  # a step settled later than its waiter's patience
    scenario(10, "kill-writer"),  # a frozen read of a crashed group held the step's end
    scenario(132, "kill-writer"),  # a save task made after a group's crash never ended
    scenario(8, "none"),  # a recurrent state was saved under the event of its layer's entry
    scenario(33, "flaky-store"),  # a close that raised was never tried again
]
