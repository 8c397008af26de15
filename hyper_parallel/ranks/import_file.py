# SPDX-License-Identifier: Apache-2.0
"""A file as a module, by its path: tests' and users' files need not be found by their names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from hyper_parallel.platform.error_codes import coded


def import_file(path: str | Path, name: str) -> ModuleType:
    """The module of that name, which the file has just become; nothing is left of one that raises."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise coded(
            ImportError,
            "HP602",
            f"cannot import {name} from {path}: it is no Python file",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
