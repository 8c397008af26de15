# SPDX-License-Identifier: Apache-2.0
"""Compiles the warm path of dispatch and the checksums when the package is built; else the same runs in Python."""

import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (
    "hyper_parallel/core/shard/_fast.c",
    "hyper_parallel/core/distributed_checkpoint/_block_sums.c",
)


class CompileFastPaths(BuildHookInterface):
    """Puts each compiled module beside its source, and into the wheel."""

    def initialize(self, version, build_data):  # noqa: ARG002 - hatchling's signature
        for source in SOURCES:
            target = Path(source).with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
            try:
                compile_module(Path(self.root) / source, Path(self.root) / target)
            except (OSError, subprocess.CalledProcessError) as error:
                self.app.display_warning(
                    f"{source} was not compiled ({error}); its Python twin will do"
                )
                continue
            build_data["artifacts"].append(str(target))
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def compile_module(source, target):
    """Compiles one C file; the module appears whole or not at all, as processes may have the old one open."""
    compiler = shlex.split(
        os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    )
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        flags = ["-O2", "-shared", "-fPIC", f"-I{include}"]
        subprocess.run(  # noqa: S603
            [*compiler, *flags, str(source), "-o", str(made)],
            check=True,
            capture_output=True,
        )
        made.replace(target)
