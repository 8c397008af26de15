# SPDX-License-Identifier: Apache-2.0
"""The framework's own distributed tensors: MindSpore has none whose shards one could have, and each method says so."""

from __future__ import annotations

from typing import Any, NoReturn

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import NativeMesh, NativeTensor, Platform


class Interop(Platform):
    """The part of the contract that is about the framework's own meshes and distributed tensors."""

    def from_native_mesh(self, mesh: Any) -> NativeMesh:
        _refuse("from_native_mesh", type(mesh).__name__)

    def to_native_mesh(self, parts: NativeMesh) -> Any:  # noqa: ARG002 - refused whatever it is
        _refuse("to_native_mesh", "a mesh")

    def from_native_dtensor(self, tensor: Any) -> NativeTensor:
        _refuse("from_native_dtensor", type(tensor).__name__)

    def to_native_dtensor(self, parts: NativeTensor) -> Any:  # noqa: ARG002 - refused whatever it is
        _refuse("to_native_dtensor", "a distributed tensor")


def _refuse(call: str, what: str) -> NoReturn:
    raise coded(
        TypeError,
        "HP228",
        f"{call}: MindSpore has no distributed tensors or meshes of its own to exchange with, got {what}; use "
        "hyper_parallel.DTensor.from_local and to_local with plain tensors",
    )
