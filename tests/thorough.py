# SPDX-License-Identifier: Apache-2.0
"""How much is tried of what there is too much of: in CI every case once, by ``make thorough`` each combination."""

import os

THOROUGH = os.environ.get("HYPER_PARALLEL_THOROUGH", "") not in ("", "0")
