"""The identifiers that cross APIs. Plain ints, strings and bytes at run time; different types for the checker."""

from __future__ import annotations

from typing import NewType

GroupId = NewType("GroupId", int)
"""Number of a KV group, as in the layout."""

BlockIndex = NewType("BlockIndex", int)
"""Position of a block in its request, counted in blocks of its group from token 0."""

BlockId = NewType("BlockId", int)
"""Number of a block in the worker's local KV memory; 0 is the null block in vLLM."""

BlockHash = NewType("BlockHash", bytes)
"""Chained hash of all tokens up to the end of a block; any length."""

RequestId = NewType("RequestId", str)

StepId = NewType("StepId", int)

ModelLayer = NewType("ModelLayer", int)
"""Layer number in the whole model ("physical"); layouts and ranges use it."""

StageLayer = NewType("StageLayer", int)
"""Layer number in this pipeline stage, from 0; messages and `wait_layer` use it."""
