# SPDX-License-Identifier: Apache-2.0
"""A mesh of two ranks, for docs/differences.md."""

from hyper_parallel import init_device_mesh

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
