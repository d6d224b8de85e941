"""What a forked process runs: a Python block of the documentation, beside what the reader's script has.

A block that uses a name which neither it defines nor `_TORCH` or `_MXNET` has, ends with a `NameError`, as it
would for a reader.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.integration.docs.pages import ROOT

Names = dict[str, Any]
Given = Mapping[str, tuple[tuple[str, ...], Callable[[Names], Any]]]
"""What a script has: each name, the names that it is made of, and how it is made."""


def run_block(*, framework: str, page: str, line: int, before: str, text: str, folder: str) -> None:
    """Run a block in a folder, as one of the reader's own scripts.

    Args:
        framework: torch, mxnet, or plain: it uses neither.
        page, line: where it is, for tracebacks.
        before: blocks that it goes on from.
        text: the block's own.
        folder: working directory.
    """
    os.chdir(folder)
    if not Path("examples").exists():
        Path("examples").symlink_to(ROOT / "examples")
    names: Names = {"__name__": "__main__"}
    whole = before + text
    wanted = {node.id for node in ast.walk(ast.parse(whole)) if isinstance(node, ast.Name)}
    if framework == "torch":
        import torch

        if "init_process_group" not in whole:
            torch.distributed.init_process_group("netstorm")
        _give(names, wanted, _TORCH)
    elif framework == "mxnet":
        import netstorm.frontends.mxnet  # noqa: F401

        _give(names, wanted, _MXNET)
    for first, source in ((1, before), (line, text)):
        exec(compile("\n" * (first - 1) + source, page, "exec"), names)
    if framework == "torch":
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    print("ran to its end", flush=True)
    if framework != "mxnet" and "missing_ok" not in whole:  # whose job ends at the interpreter's end
        os._exit(0)  # the end of an interpreter with PyTorch takes longer than most blocks


def _give(names: Names, wanted: set[str], given: Given) -> None:
    """Add what the script has already, in the order of the table: later ones are made of earlier ones."""
    needed = set(wanted)
    for name, (also, _) in reversed(list(given.items())):
        if name in needed:
            needed |= set(also)
    for name, (_, make) in given.items():
        if name in needed:
            names[name] = make(names)


def _torch_model(_: Names) -> Any:
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])
            self.head = nn.Linear(4, 2)

        def forward(self, inputs: Any) -> Any:
            return self.head(self.blocks[0](self.embedding(inputs)))

    return Model()


def _torch_loss_of(names: Names) -> Callable[[Any, Any], Any]:
    cross_entropy: Callable[[Any, Any], Any] = names["nn"].functional.cross_entropy
    return cross_entropy


def _torch_loss(names: Names) -> Callable[[Any, Any], Any]:
    return lambda model, batch: names["loss_of"](model(batch[0]), batch[1])


def _torch_samples(names: Names) -> Any:
    torch = names["torch"]
    return torch.utils.data.TensorDataset(torch.randn(96, 4), torch.zeros(96, dtype=torch.long))


def _torch_train(names: Names) -> Callable[[int], None]:
    def train(step: int) -> None:
        names["optimizer"].zero_grad()
        names["loss"](names["model"], names["batches"][step]).backward()
        names["optimizer"].step()

    return train


_TORCH: Final[Given] = {
    "torch": ((), lambda _: sys.modules["torch"]),
    "dist": (("torch",), lambda names: names["torch"].distributed),
    "nn": (("torch",), lambda names: names["torch"].nn),
    "model": (("nn",), _torch_model),
    "optimizer": (
        ("model", "torch"),
        lambda names: names["torch"].optim.SGD(names["model"].parameters(), lr=0.1),
    ),
    "schedule": (
        ("optimizer",),
        lambda names: names["torch"].optim.lr_scheduler.StepLR(names["optimizer"], 1),
    ),
    "samples": (("torch",), _torch_samples),
    "batches": (
        ("samples",),
        lambda names: [names["samples"][place : place + 8] for place in range(0, 96, 8)],
    ),
    "my_share": (("batches",), lambda names: lambda _, rank, size: names["batches"][rank::size]),
    "data": ((), lambda _: "my_share deals it"),
    "loss_of": (("nn",), _torch_loss_of),
    "loss": (("loss_of",), _torch_loss),
    "inputs": (("torch",), lambda names: names["torch"].randn(8, 4)),
    "labels": (("torch",), lambda names: names["torch"].zeros(8, dtype=names["torch"].long)),
    "next_batch": (("batches",), lambda names: lambda: names["batches"][0]),
    "backward": (("loss",), lambda names: lambda model, batch: names["loss"](model, batch).backward()),
    "steps": ((), lambda _: 3),
    "train": (("optimizer", "loss", "batches"), _torch_train),
}
"""Of a script of PyTorch, before it meets NetStorm."""


def _mxnet_net(names: Names) -> Any:
    net = names["mx"].gluon.nn.Dense(2, in_units=4)
    net.initialize()
    return net


def _mxnet_batches(names: Names) -> Any:
    nd = names["mx"].nd
    return [(nd.random.normal(shape=(8, 4)), nd.zeros(8)) for _ in range(3)]


def _mxnet_backward(names: Names) -> Callable[[Any, Any], None]:
    def backward(net: Any, batch: Any) -> None:
        with names["mx"].autograd.record():
            loss = names["loss_of"](net(batch[0]), batch[1])
        loss.backward()

    return backward


def _mxnet_train(names: Names) -> Callable[[int], None]:
    def train(_: int) -> None:
        for images, labels in names["batches"]:
            names["backward"](names["net"], (images, labels))
            names["trainer"].step(8)

    return train


_MXNET: Final[Given] = {
    "mx": ((), lambda _: sys.modules["mxnet"]),
    "net": (("mx",), _mxnet_net),
    "batches": (("mx",), _mxnet_batches),
    "batches_from": (("batches",), lambda names: lambda _, batch: names["batches"][batch:]),
    "my_share": (("batches",), lambda names: lambda *_: names["batches"]),
    "data": ((), lambda _: "my_share deals it"),
    "batch_size": ((), lambda _: 8),
    "loss_of": (("mx",), lambda names: names["mx"].gluon.loss.SoftmaxCrossEntropyLoss()),
    "next_batch": (("batches",), lambda names: lambda: names["batches"][0]),
    "backward": (("loss_of", "mx"), _mxnet_backward),
    "train": (("batches", "backward", "net"), _mxnet_train),
    "symbol": (
        ("mx",),
        lambda names: names["mx"].sym.SoftmaxOutput(names["mx"].sym.Variable("data"), name="softmax"),
    ),
    "value": (("mx",), lambda names: names["mx"].nd.zeros((8, 4))),
    "gradient_of": ((), lambda _: lambda value, _: 0 * value + 1),
}
"""Of a script of MXNet."""
