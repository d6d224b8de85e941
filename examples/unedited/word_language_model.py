"""A language model of a small text, in the manner of Gluon's word_language_model.

python -m netstorm launch -n 3 -- python -m netstorm.run word_language_model.py --kvstore dist_sync
"""

from __future__ import annotations

import argparse
import hashlib
import math
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

WORDS = [
    "the",
    "sum",
    "of",
    "all",
    "gradients",
    "goes",
    "up",
    "the",
    "tree",
    "and",
    "the",
    "sum",
    "comes",
    "down",
    "the",
    "tree",
    "so",
    "that",
    "every",
    "node",
    "has",
    "the",
    "same",
    "sum",
    "and",
    "every",
    "node",
    "has",
    "the",
    "same",
    "model",
]


class Model(gluon.Block):
    """Embedding, LSTM and a decoder."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.width = width
        with self.name_scope():
            self.encoder = nn.Embedding(words, width)
            self.rnn = rnn.LSTM(width, input_size=width)
            self.decoder = nn.Dense(words, in_units=width)

    def forward(self, inputs: Any, hidden: Any) -> tuple[Any, Any]:
        """Return scores of the next words, and the new state; `inputs` is (time, batch)."""
        output, hidden = self.rnn(self.encoder(inputs), hidden)
        return self.decoder(output.reshape((-1, self.width))), hidden

    def begin_state(self, batch_size: int) -> Any:
        """Return the state before the first word."""
        return self.rnn.begin_state(batch_size=batch_size)


def main() -> None:
    """Train, and print the perplexity and which weights the model has."""
    parser = argparse.ArgumentParser(description="language model")
    parser.add_argument("--kvstore", default="device")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--bptt", type=int, default=6, help="sequence length")
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--clip", type=float, default=0.2, help="gradient clipping by global norm")
    args = parser.parse_args()

    kv = mx.kv.create(args.kvstore)
    mx.random.seed(1)
    vocabulary = {word: number for number, word in enumerate(sorted(set(WORDS)))}
    corpus = np.array([vocabulary[word] for word in WORDS * 40], np.float32)
    length = len(corpus) // kv.num_workers
    mine = corpus[kv.rank * length : (kv.rank + 1) * length]
    steps = len(mine) // args.batch_size
    data = mx.nd.array(mine[: steps * args.batch_size].reshape((args.batch_size, steps)).T)

    model = Model(len(vocabulary), args.width)
    model.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(
        model.collect_params(),
        "sgd",
        {"learning_rate": args.lr, "momentum": 0, "wd": 0},
        kvstore=kv,
        update_on_kvstore=False,
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    parameters = model.collect_params().values()
    for epoch in range(args.epochs):
        total, count = 0.0, 0
        hidden = model.begin_state(args.batch_size)
        for start in range(0, steps - 1 - args.bptt, args.bptt):
            inputs, target = (
                data[start : start + args.bptt],
                data[start + 1 : start + 1 + args.bptt],
            )
            hidden = [state.detach() for state in hidden]
            with autograd.record():
                output, hidden = model(inputs, hidden)
                loss = loss_of(output, target.reshape((-1,)))
            loss.backward()
            trainer.allreduce_grads()
            scale = args.bptt * args.batch_size * kv.num_workers
            gluon.utils.clip_global_norm([one.grad() for one in parameters], args.clip * scale)
            trainer.update(scale)
            total += float(loss.sum().asscalar())
            count += loss.size
        print(f"[Epoch {epoch}] perplexity {math.exp(total / count):.3f}")
    weights = b"".join(one.data().asnumpy().tobytes() for one in parameters)
    print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
