"""Tensors and addresses: views over raw cache memory, and what the engine and a store need to know of them.

Needs torch; the rest of kvactors does not.
"""

from kvactors.memory.attention import (
    KVOrder,
    attention_views,
    combined_attention_view,
    contiguous_attention_views,
    kernel_block_ids,
)
from kvactors.memory.entries import HUGE_PAGE_BYTES, GroupMemory, group_memory, placed_entries, registered_regions
from kvactors.memory.placement import allocate_kv_cache, cache_views
from kvactors.memory.state_rows import clear_state_rows_, gather_state_rows, scatter_state_rows_
from kvactors.memory.states import contiguous_state_views, state_views

__all__ = [
    "HUGE_PAGE_BYTES",
    "GroupMemory",
    "KVOrder",
    "allocate_kv_cache",
    "attention_views",
    "cache_views",
    "clear_state_rows_",
    "combined_attention_view",
    "contiguous_attention_views",
    "contiguous_state_views",
    "gather_state_rows",
    "group_memory",
    "kernel_block_ids",
    "placed_entries",
    "registered_regions",
    "scatter_state_rows_",
    "state_views",
]
