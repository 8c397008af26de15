# SPDX-License-Identifier: Apache-2.0
"""Ends the rank processes with the session."""

import pytest

from hyper_parallel.testing import close_ranks


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session():
    yield
    close_ranks()
