"""PyTorch's compiler, torch._dynamo, left out of runs that compile nothing."""

import importlib
import importlib.util
import sys
import types

import torch

NAME = "torch._dynamo"


def leave_out():
    """Has optimizers do without the compiler, which they would import to tell it what
    it should not compile: that took half of a run's start and 150 MB. Whoever needs
    more of it gets it."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = _NoDynamo(NAME)
        sys.meta_path.insert(0, _Loaded)


class _NoDynamo(types.ModuleType):
    """What optimizers use. Anything else is the real module's, which takes this one's
    place."""

    @staticmethod
    def graph_break(*args, **kwargs):
        pass

    @staticmethod
    def disable(fn=None, *args, **kwargs):
        return fn if fn is not None else lambda fn: fn

    def __getattr__(self, name):
        # Whoever looks through all modules, as inspect does, wants nothing of it.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME], torch._dynamo
        return getattr(importlib.import_module(NAME), name)


class _Loaded:
    """Finds modules of the compiler that are there already: an import of one, for which
    Python asks the stand-in, loads them all, and would load that one again."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if not name.startswith(f"{NAME}.") or name not in sys.modules:
            return None
        return importlib.util.spec_from_loader(name, cls(sys.modules[name]))

    def __init__(self, module):
        self.module = module

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        sys.modules[module.__name__] = self.module
