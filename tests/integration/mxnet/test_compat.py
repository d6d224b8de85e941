"""Importing MXNet on Pythons and NumPys that are newer than it."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.mxnet.script_process import Script


def test_mxnet_trains_after_an_import_that_itself_warns_of_nothing(script: Callable[..., Script]) -> None:
    source = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from netstorm.frontends.mxnet.compat import mx
print("ours:", sum("netstorm" in warning.filename for warning in caught), "of", len(caught) > 3)
net = mx.gluon.nn.Dense(2)
net.initialize()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
with mx.autograd.record():
    loss = net(mx.nd.ones((4, 3))).sum()
loss.backward()
trainer.step(4)
print("weights", net.weight.data().asnumpy().shape)
"""
    process = script(source, prologue=False)
    assert process.end() == 0, process.errors
    assert process.output == "ours: 0 of True\nweights (2, 3)\n"


SITUATIONS = {
    "no MXNet": (
        "import sys; sys.modules['mxnet'] = None",
        "UsageError MXNet is not installed: pip install 'netstorm[mxnet]'",
    ),
    "NumPy 2": (
        "import numpy; numpy.__version__ = '2.1.0'",
        "UsageError NumPy 2.1.0 is installed; MXNet 1.9 needs NumPy 1",
    ),
    "MXNet 2": (
        "import sys, types; sys.modules['mxnet'] = types.SimpleNamespace(__version__='2.0.0')",
        "UsageError MXNet 2.0.0 is installed; NetStorm works with the 1.9 wheels",
    ),
    "no distutils": (
        """
import sys, importlib.util
sys.modules['setuptools'] = None
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == 'distutils' else find(name, *rest)
""",
        "UsageError MXNet imports distutils, which Python 3.12 removed; to bring it back: pip install",
    ),
    "something that MXNet needs is missing": (
        "import sys; sys.modules['requests'] = None",
        "ModuleNotFoundError import of requests",
    ),
}


def test_what_cannot_be_imported_is_an_error_with_what_to_do(script: Callable[..., Script]) -> None:
    show = """
try:
    import netstorm.frontends.mxnet.compat
except Exception as error:
    print(type(error).__name__, error)
"""
    for situation, (preparation, message) in SITUATIONS.items():
        process = script(preparation + show, prologue=False)
        assert process.end() == 0, (situation, process.errors)
        assert message in process.output, situation
