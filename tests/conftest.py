# SPDX-License-Identifier: Apache-2.0
"""Tests run on PyTorch unless HYPER_PARALLEL_PLATFORM says otherwise; the rank processes end with the session.

Workers of xdist take whole files, the longest ones first: one that began last would leave the other worker idle.
"""

import os

import pytest

FRAMEWORK = os.environ.setdefault(
    "HYPER_PARALLEL_PLATFORM", "torch"
)  # both may be installed

from hyper_parallel.testing import close_ranks, preload  # noqa: E402 - the framework must be chosen before

# What is written for PyTorch, and what needs MindSpore; tests/backend is for both.
collect_ignore = {
    "torch": ["on_mindspore", "frameworks"],
    "mindspore": ["distributed", "docs", "guards", "unit"],
}[FRAMEWORK]
collect_ignore_glob = ["*_mindspore.py"] if FRAMEWORK == "torch" else ["*_torch.py"]

if FRAMEWORK == "torch":
    preload(
        "hypothesis", "torch._dynamo", "torch.distributed.tensor"
    )  # which optimizers and assert_close import
if FRAMEWORK == "torch" and "PYTEST_XDIST_WORKER" in os.environ:
    # Several files need these, and every rank would import them for itself; a single file starts sooner without.
    preload(
        "torch.testing._internal.common_methods_invocations",
        "transformers.models.llama.modeling_llama",
    )


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session():
    yield
    close_ranks()


LONGEST_FIRST = [  # by the time they take, largest first: what is not here takes a few seconds
    "rules/test_operators.py",
    "rules/test_dispatch.py",
    "frameworks/test_parity.py",
    "distributed/test_irregular.py",
    "distributed/test_train_command.py",
    "rules/test_sweep_torch.py",
    "distributed/test_in_place_torch.py",
    "frameworks/test_shared_checkpoint_example.py",
    "rules/test_writes.py",
    "docs/test_documents.py",
    "distributed/test_hosts.py",
    "distributed/test_told_in_time.py",
    "frameworks/test_shared_checkpoint.py",
    "distributed/test_ranks.py",
    "on_mindspore/test_ending.py",
    "backend/test_collectives.py",
    "docs/test_site.py",
    "frameworks/test_train_recipe.py",
    "distributed/test_training.py",
    "distributed/test_training_habits.py",
    "distributed/test_second_order.py",
    "distributed/test_planning_torch.py",
    "distributed/test_folders_torch.py",
    "unit/test_planning_torch.py",
    "distributed/test_transformers.py",
    "distributed/test_llama_example.py",
    "distributed/test_recurrent.py",
    "distributed/test_demo.py",
    "on_mindspore/test_operators.py",
    "rules/test_controls_of_windows.py",
    "backend/test_store_collectives_mindspore.py",
    "rules/test_controls_of_matrices.py",
    "on_mindspore/test_distributed.py",
    "docs/test_errors.py",
    "distributed/test_checkpoint_kills.py",
    "unit/test_data_file.py",
    "distributed/test_multihead.py",
    "distributed/test_order_check.py",
    "distributed/test_programs.py",
    "rules/test_controls.py",
    "distributed/test_training_state.py",
    "backend/test_symmetric_memory.py",
    "distributed/test_loss_parallel.py",
    "distributed/test_redistribute.py",
    "unit/test_doctor.py",
    "distributed/test_warm_path.py",
    "on_mindspore/test_calls.py",
]


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # a worker of xdist
        places = {name: place for place, name in enumerate(LONGEST_FIRST)}
        items.sort(
            key=lambda item: places.get("/".join(item.path.parts[-2:]), len(places))
        )
