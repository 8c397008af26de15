# SPDX-License-Identifier: Apache-2.0
"""What the session in docs/architecture.md has imported."""

from hyper_parallel import Layout  # noqa: F401
from hyper_parallel.core.dtensor.redistribution import plan  # noqa: F401
