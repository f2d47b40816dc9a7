"""What connects kvactors to vLLM. This package loads without vLLM; its modules import vLLM when they are called.

`KVActorsConnector` is what vLLM asks for by `kv_connector_module_path="kvactors.vllm"`; `AscendStoreConnector` is it too, under
the name for which vLLM-Ascend keeps recurrent states at block boundaries.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AscendStoreConnector", "KVActorsConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvactors.vllm.connector import KVActorsConnector

        return KVActorsConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
