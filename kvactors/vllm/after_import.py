"""Do something with a module once it is imported, without importing it.

A plugin of vLLM runs in every process of it, early, and also in processes that never load a model runner. To import a runner
there would cost seconds, and would come before the patches that its own package applies first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

Then = Callable[[ModuleType], None]


def after_import(name: str, then: Then) -> None:
    """Calls `then` with the module: now if it is loaded, else when it is; once, however often it is asked for."""
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(finder, _Waiting) and (finder.name, finder.then) == (name, then) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting(name, then))


class _Waiting(MetaPathFinder):
    """Stands first among the finders until the module is loaded; the others find it. A mere look changes nothing."""

    def __init__(self, name: str, then: Then) -> None:
        self.name, self.then = name, then
        self.asking = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - part of the finders' protocol
        target: ModuleType | None = None,  # noqa: ARG002 - part of the finders' protocol
    ) -> ModuleSpec | None:
        if fullname != self.name or self.asking:
            return None
        self.asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self.asking = False
        loader = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                sys.meta_path.remove(self)
                self.then(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]  # this one loader, for this one module
        return spec
