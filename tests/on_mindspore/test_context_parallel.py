# SPDX-License-Identifier: Apache-2.0
"""MindSpore's Llama, unchanged, with its sequences sharded: loss and gradients of one process."""

import at_once  # noqa: F401 - for what it does
import mindspore
import numpy as np
from mindspore import Tensor, ops

import model_mindspore as example
from hyper_parallel import init_device_mesh, local_batch, shard_sequence
from hyper_parallel.testing import run_ranks

VOCAB = 32


def model_of():
    mindspore.set_seed(0)
    sizes = {"layers": 1, "dim": 16, "hidden": 24, "heads": 4, "kv_heads": 2}
    model = example.Llama(example.Config(vocab=VOCAB, context=16, **sizes))
    random = np.random.default_rng(0)
    for parameter in model.get_parameters():
        values = random.standard_normal(parameter.shape) * 0.4
        parameter.set_data(Tensor(values.astype(np.float32)))
    return model


def gradients_of(model, ids, labels):
    def loss(ids):
        logits = ops.transpose(model(ids), (0, 2, 1))
        return ops.cross_entropy(logits, labels)

    weights = model.trainable_params()
    return mindspore.value_and_grad(loss, None, weights=weights)(ids)


def whole(tensor):
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.asnumpy()


def compare():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    random = np.random.default_rng(1)
    ids, labels = random.integers(VOCAB, size=(2, 2, 10)).astype(np.int32)
    loss, gradients = gradients_of(model_of(), Tensor(ids), Tensor(labels))
    for load_balance in (False, True):
        many = shard_sequence(model_of(), mesh, load_balance=load_balance)
        targets = local_batch(Tensor(labels), many)
        found, others = gradients_of(many, Tensor(ids), targets)
        np.testing.assert_allclose(whole(found), loss.asnumpy(), rtol=1e-5)
        for one, other in zip(others, gradients, strict=True):
            np.testing.assert_allclose(
                whole(one), other.asnumpy(), rtol=1e-3, atol=1e-5
            )


def test_llama_has_the_loss_and_gradients_of_one_process():
    run_ranks(compare, 2)
