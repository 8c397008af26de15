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
    "distributed/test_train_command.py",
    "distributed/test_irregular.py",
    "rules/test_operators.py",
    "rules/test_dispatch.py",
    "frameworks/test_parity.py",
    "frameworks/test_shared_checkpoint_example.py",
    "distributed/test_llama_example.py",
    "distributed/test_transformers.py",
    "distributed/test_planning_torch.py",
    "distributed/test_folders_torch.py",
    "distributed/test_told_in_time.py",
    "frameworks/test_shared_checkpoint.py",
    "distributed/test_warm_path.py",
    "on_mindspore/test_calls.py",
    "distributed/test_demo.py",
    "on_mindspore/test_operators.py",
    "backend/test_store_collectives_mindspore.py",
    "on_mindspore/test_distributed.py",
    "distributed/test_pipeline_recipe_torch.py",
    "distributed/test_hosts.py",
    "distributed/test_ranks.py",
    "on_mindspore/test_ending.py",
    "rules/test_sweep_torch.py",
    "backend/test_collectives.py",
    "frameworks/test_train_recipe.py",
    "distributed/test_recurrent.py",
    "unit/test_planning_torch.py",
    "docs/test_documents.py",
    "distributed/test_in_place_torch.py",
    "distributed/test_context_fronts_torch.py",
    "distributed/test_checkpoint_kills.py",
    "distributed/test_context_parallel_torch.py",
    "docs/test_errors.py",
    "distributed/test_redistribute.py",
    "distributed/test_job_processes.py",
    "distributed/test_pipeline_split_torch.py",
    "distributed/test_compile_torch.py",
    "distributed/test_pipeline_meshes_torch.py",
    "distributed/test_context_models_torch.py",
    "distributed/test_second_order.py",
    "distributed/test_expert_recipe_torch.py",
    "distributed/test_order_check.py",
    "backend/test_messages.py",
    "distributed/test_context_recipe_torch.py",
    "unit/test_data_file.py",
    "backend/test_deferred_init_torch.py",
    "distributed/test_pipeline_faults_torch.py",
    "distributed/test_context_transformers_torch.py",
    "guards/test_imports.py",
    "distributed/test_loss_parallel.py",
    "distributed/test_expert_transformers_torch.py",
    "distributed/test_multihead.py",
    "distributed/test_collective_counts_torch.py",
    "distributed/test_fully_shard_states_torch.py",
    "distributed/test_fully_shard_wrapping_torch.py",
    "backend/test_symmetric_memory.py",
    "distributed/test_training.py",
    "distributed/test_pipeline_overlap_torch.py",
    "distributed/test_fully_shard_passes_torch.py",
    "rules/test_writes.py",
]


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # a worker of xdist
        places = {name: place for place, name in enumerate(LONGEST_FIRST)}
        items.sort(
            key=lambda item: places.get("/".join(item.path.parts[-2:]), len(places))
        )
