"""DCASGD on owners: gradients are corrected for what others have changed since they were computed.

A gradient g of rank m was computed on the value that m has pulled, w_bak(m). On the value w that it is
applied to, it would have been about g + λ g⊙g⊙(w - w_bak(m)) (Zheng et al., "Asynchronous Stochastic Gradient
Descent with Delay Compensation", ICML 2017, equation 10 and algorithm 2).

`mx.optimizer.DCASGD` has one previous weight for all ranks, which is that before the last update by whomever.
It so corrects even the gradients of a rank that trains alone, and with a momentum it fails on every array of
more than one element. So owners take its hyper-parameters and its states, and update as the paper says. Where
there is a momentum, it is over corrected gradients, as in MXNet.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from netstorm.frontends.mxnet.compat import mx
from netstorm.frontends.mxnet.engine.binding import NDArray

__all__ = ["compensated_update"]


def compensated_update(
    optimizer: mx.optimizer.Optimizer,
    key: int | str,
    weight: NDArray,
    gradient: NDArray,
    state: object,
    *,
    base: NDArray,
) -> None:
    """Queue an update.

    Args:
        optimizer: an `mx.optimizer.DCASGD`.
        key: the user's.
        weight: is updated.
        gradient: of one rank, dense or row-sparse.
        state: what the optimizer's `create_state_multi_precision` has returned: the momentum and the previous
            weight, with a float32 copy of a float16 weight before them if there is one. The previous weight
            becomes `base`.
        base: the weight that the gradient was computed on.
    """
    rule = cast("Any", optimizer)
    rule._update_count(key)  # noqa: SLF001 -- the interface that MXNet's own optimizers use
    rate, decay = rule._get_lr(key), rule._get_wd(key)  # noqa: SLF001
    target, states = weight, cast("Any", state)
    if rule.multi_precision and weight.dtype == np.float16:
        target, states = states
    momentum, previous = states
    with mx.autograd.pause():
        previous[:] = base.astype(target.dtype)
        found = gradient.tostype("default").astype(target.dtype) * rule.rescale_grad
        if rule.clip_gradient is not None:
            found = mx.nd.clip(found, -rule.clip_gradient, rule.clip_gradient)
        found = found + rule.lamda * found * found * (target - previous) + decay * target
        if momentum is None:
            target -= rate * found
        else:
            momentum *= rule.momentum
            momentum -= rate * found
            target += momentum
        if target is not weight:
            weight[:] = target.astype(weight.dtype)
