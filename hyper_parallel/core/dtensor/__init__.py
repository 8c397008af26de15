# SPDX-License-Identifier: Apache-2.0
"""What a distributed tensor is: placements, meshes, layouts, and the plans that lead from one layout to another."""
