# SPDX-License-Identifier: Apache-2.0
"""Calls of recurrent layers and cells; tests/distributed/test_recurrent.py has the modules."""

from rules.framework import torch
from rules.operators import OpCase

SIZES = ("even", "uneven", "empty")


def layers(function, batch_first=False, bias=True, both=False):
    """One layer, with its state or states given first."""

    def call(x, *more):
        count = 2 if function is torch.lstm else 1
        states, weights = more[:count], list(more[count:])
        return function(
            x,
            states if count == 2 else states[0],
            weights,
            bias,
            1,
            0.0,
            True,
            both,
            batch_first,
        )

    return call


def op(name, call, shapes, shards="b", carries=0, sizes=SIZES, **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


CASES = [
    op("lstm", layers(torch.lstm), "4a3 1a2 1a2 83 82 8 8"),
    op("lstm, batch first", layers(torch.lstm, True), "a43 1a2 1a2 83 82 8 8"),
    op("lstm, projected", layers(torch.lstm), "4a3 1a1 1a2 83 81 8 8 12"),
    op("gru, no bias", layers(torch.gru, bias=False), "4a3 1a2 63 62"),
    op("gru, both ways", layers(torch.gru, both=True), "4a3 2a2 63 62 6 6 63 62 6 6"),
    op("rnn_tanh", layers(torch.rnn_tanh), "4a3 1a2 23 22 2 2"),
    op("rnn_relu", layers(torch.rnn_relu, True), "a43 1a2 23 22 2 2"),
    op(
        "lstm_cell",
        lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w),
        "a3 a2 a2 83 82 8 8",
    ),
    op("gru_cell", torch.gru_cell, "a3 a2 63 62"),
]

COMPOSITES = [
    op("rnn_tanh_cell", torch.rnn_tanh_cell, "a3 ab b3 bb b b"),
    op("rnn_relu_cell", torch.rnn_relu_cell, "a3 ab b3 bb"),
]
