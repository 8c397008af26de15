# SPDX-License-Identifier: Apache-2.0
"""``platform/<framework>/patches.py`` lists everything in a framework that this package replaces."""

import json
import os
import subprocess
import sys

import pytest

# Callable attributes of every module and class of the framework, before and after the platform is chosen. Modules
# load more of themselves, so what is new in a module does not count; what is new in a class does.
SCRIPT = """
import inspect, json, sys
{before}

def attributes():
    found = {{}}
    modules = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == {framework!r}]
    classes = {{v for m in modules for v in vars(m).values() if inspect.isclass(v) and belongs(v)}}
    for owner in [*filter(None, modules), *classes]:
        for name, value in list(vars(owner).items()):
            if callable(value):
                found[owner, name] = value
    return found

def belongs(owner):
    name = owner.__name__ if inspect.ismodule(owner) else str(getattr(owner, "__module__", ""))
    return name.split(".")[0] == {framework!r}

def label(owner, name):
    place = owner.__name__ if inspect.ismodule(owner) else f"{{owner.__module__}}.{{owner.__qualname__}}"
    return f"{{place}}.{{name}}"

first = attributes()
owners = {{owner for owner, _ in first}}
{between}
import hyper_parallel
hyper_parallel.get_platform()
changed = {{
    label(*key)
    for key, value in attributes().items()
    if (first[key] is not value if key in first else key[0] in owners and inspect.isclass(key[0]))
}}
from hyper_parallel.platform.patching import INSTALLED
listed = {{label(*key) for key in INSTALLED if belongs(key[0])}}
print(json.dumps([sorted(changed), sorted(listed)]))
"""
LOADS = {
    "torch": "import torch, torch.distributed, torch.masked, torch.testing, torch.utils.checkpoint",
    "mindspore": "import mindspore, mindspore.mint, mindspore.nn, mindspore.ops, mindspore.experimental.optim",
}


def replaced(framework, between=""):
    """(what is replaced in a framework, what is listed) when a fresh process chooses the platform."""
    code = SCRIPT.format(before=LOADS[framework], framework=framework, between=between)
    environment = {
        **os.environ,
        "HYPER_PARALLEL_PLATFORM": framework,
        "GLOG_v": "3",
    }
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("framework", LOADS)
def test_everything_replaced_is_listed(framework):
    pytest.importorskip(framework)
    changed, listed = replaced(framework)
    assert listed
    assert changed == listed


def test_control_an_unlisted_replacement_is_found():
    pytest.importorskip("torch")
    changed, listed = replaced("torch", "torch.nn.Linear.forward = lambda *_: None")
    assert set(changed) - set(listed) == {"torch.nn.modules.linear.Linear.forward"}
