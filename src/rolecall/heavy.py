"""Imports that bring torch and transformers."""

import gc
from importlib import import_module
from types import ModuleType


def import_heavy(name: str) -> ModuleType:
    """The module, imported with garbage collection paused.

    Nearly all that such imports allocate stays, and searching it again and again takes a fifth of their time.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if paused:
            gc.enable()
