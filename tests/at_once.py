# SPDX-License-Identifier: Apache-2.0
"""Importing this makes MindSpore run each operator at once: errors come from their line, and no threads spin for more.

By default it runs them in the background, as users do in the examples and programs that the tests start.
"""

import mindspore

mindspore.runtime.launch_blocking()
