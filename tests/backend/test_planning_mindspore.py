# SPDX-License-Identifier: Apache-2.0
"""On MindSpore plans are loaded, not found."""

import pytest

from hyper_parallel import get_platform
from hyper_parallel.platform.error_codes import code_of

platform = get_platform()


@pytest.mark.parametrize(
    "call",
    [
        lambda: platform.copy_without_data(None),
        platform.simulate_ranks,
        lambda: platform.listen_to_functions(print),
    ],
)
def test_what_planning_needs_is_refused(call):
    with pytest.raises(NotImplementedError, match="plan it on PyTorch") as caught:
        call()
    assert code_of(caught.value) == "HP903"
