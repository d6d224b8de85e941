"""One worker process of `mxnet_loopback.py`: batches of a small network, as MXNet's own examples train it.

Commands: steps (trains some batches: start, end, how often the process was woken), weights (a digest).
"""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.serving import Answer, serve
from netstorm.frontends.mxnet.compat import mx

_BATCH: Final = 64
_PIXELS: Final = 784
_CLASSES: Final = 10


class Training:
    """The perceptron of MXNet's `train_mnist.py`, six keys, on random pictures."""

    def __init__(self, store: str) -> None:
        if store.endswith("_netstorm"):
            import netstorm.frontends.mxnet  # noqa: F401, PLC0415 - registers the stores
        self.store: Any = mx.kv.create(store)
        mx.random.seed(7 + self.store.rank)
        data = mx.nd.random.uniform(shape=(_BATCH, _PIXELS))
        label = mx.nd.array([index % _CLASSES for index in range(_BATCH)])
        self._batch: Any = mx.io.DataBatch(data=[data], label=[label])
        self._metric: Any = mx.metric.Accuracy()
        self._module: Any = mx.mod.Module(_perceptron(), context=mx.cpu())
        self._module.bind(data_shapes=[("data", data.shape)], label_shapes=[("softmax_label", label.shape)])
        mx.random.seed(3)
        self._module.init_params(mx.init.Xavier())
        self._module.init_optimizer(
            kvstore=self.store,
            optimizer="sgd",
            optimizer_params={"learning_rate": 0.05, "momentum": 0.9, "wd": 0.0001},
        )

    def steps(self, count: int) -> Answer:
        """Train so many batches, as `Module.fit` does."""
        module = self._module
        woken, start = _woken(), time.monotonic()
        for _ in range(count):
            module.forward_backward(self._batch)
            module.update()
            module.update_metric(self._metric, self._batch.label)
        self._metric.get()
        mx.nd.waitall()
        return {"start": start, "finish": time.monotonic(), "woken": _woken() - woken}

    def weights(self) -> Answer:
        """Return a digest of the weights, the same at all ranks if these have trained in step."""
        digest = hashlib.sha256()
        for _, value in sorted(self._module.get_params()[0].items()):
            digest.update(value.asnumpy().tobytes())
        return {"digest": digest.hexdigest()}


def _perceptron() -> Any:
    """Return `symbols/mlp.py` of MXNet's image classification example."""
    net = mx.sym.Flatten(mx.sym.Variable("data"))
    for layer, units in enumerate((128, 64), 1):
        net = mx.sym.FullyConnected(net, name=f"fc{layer}", num_hidden=units)
        net = mx.sym.Activation(net, name=f"relu{layer}", act_type="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, name="fc3", num_hidden=_CLASSES), name="softmax")


def _woken() -> int:
    """Return how often threads of this process have waited, and were woken."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def join() -> tuple[Answer, Callable[[Answer], Answer]]:
    """Join the group that the command line names the store of."""
    training = Training(sys.argv[1])

    def do(command: Answer) -> Answer:
        return training.steps(command["count"]) if command["do"] == "steps" else training.weights()

    return {"rank": training.store.rank}, do


if __name__ == "__main__":
    serve(join)
