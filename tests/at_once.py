# SPDX-License-Identifier: Apache-2.0
"""Importing this makes MindSpore run each operator at once: errors come from their line, and no threads spin for more.

By default it runs them in the background; tests/on_mindspore/test_distributed.py does so, as users do.
"""

import mindspore

mindspore.runtime.launch_blocking()
