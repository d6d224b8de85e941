# Types of what we use of MXNet 1.9, which has none of its own. Whatever is missing here is `Any`.

from typing import Any

from mxnet import autograd as autograd
from mxnet import base as base
from mxnet import context as context
from mxnet import kvstore as kvstore
from mxnet import ndarray as ndarray
from mxnet import optimizer as optimizer
from mxnet import util as util
from mxnet.base import MXNetError as MXNetError
from mxnet.context import Context as Context
from mxnet.context import cpu as cpu
from mxnet.context import cpu_pinned as cpu_pinned
from mxnet.context import gpu as gpu

__version__: str
kv = kvstore
nd = ndarray

def __getattr__(name: str) -> Any: ...
