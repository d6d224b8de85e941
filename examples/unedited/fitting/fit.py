"""Training a symbol with `Module.fit`, by the options that image-classification scripts for MXNet take.

Nothing here knows of NetStorm: it is what scripts look like that were written for `--kv-store dist_sync`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

import mxnet as mx

__all__ = ["add_fit_args", "fit"]

log = logging.getLogger(__name__)


def add_fit_args(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fit`."""
    train = parser.add_argument_group("Training")
    train.add_argument("--kv-store", default="local", help="key-value store")
    train.add_argument("--num-epochs", type=int, default=3, help="number of epochs")
    train.add_argument("--batch-size", type=int, default=32, help="samples of a batch of one worker")
    train.add_argument("--lr", type=float, default=0.1, help="initial learning rate")
    train.add_argument("--lr-factor", type=float, default=0.1, help="what the rate is multiplied by")
    train.add_argument("--lr-step-epochs", default="2", help="epochs, by commas, at which it is")
    train.add_argument("--optimizer", default="sgd", help="optimizer")
    train.add_argument("--mom", type=float, default=0.9, help="momentum of sgd and nag")
    train.add_argument("--wd", type=float, default=1e-4, help="weight decay")
    train.add_argument("--disp-batches", type=int, default=5, help="log progress after so many batches")
    train.add_argument("--devices", type=int, default=1, help="number of CPU contexts")
    train.add_argument("--model-prefix", help="where to save checkpoints")
    train.add_argument("--load-epoch", type=int, help="checkpoint to begin with")
    train.add_argument("--monitor", type=int, default=0, help="log weights after so many batches")


def _epoch_size(args: argparse.Namespace, kv: Any) -> int:
    return max(1, int(args.num_examples) // int(args.batch_size) // int(kv.num_workers))


def _lr_scheduler(args: argparse.Namespace, kv: Any) -> tuple[float, Any]:
    """Return the first learning rate and a scheduler that counts updates, which all workers make together."""
    size, begin = _epoch_size(args, kv), args.load_epoch or 0
    epochs = [int(epoch) for epoch in args.lr_step_epochs.split(",")]
    rate = args.lr
    for epoch in epochs:
        if begin >= epoch:
            rate *= args.lr_factor
    if rate != args.lr:
        log.info("learning rate is %e at epoch %d", rate, begin)
    steps = [size * (epoch - begin) for epoch in epochs if epoch > begin]
    if not steps:
        return rate, None
    return rate, mx.lr_scheduler.MultiFactorScheduler(step=steps, factor=args.lr_factor, base_lr=rate)


def _load(args: argparse.Namespace, rank: int) -> tuple[Any, Any, Any]:
    if args.load_epoch is None or args.model_prefix is None:
        return None, None, None
    prefix = args.model_prefix if rank == 0 else f"{args.model_prefix}-{rank}"
    symbol, arg_params, aux_params = mx.model.load_checkpoint(prefix, args.load_epoch)
    return symbol, arg_params, aux_params


def fit(
    args: argparse.Namespace,
    network: Any,
    data_loader: Callable[[Any, Any], tuple[Any, Any]],
) -> Any:
    """Train `network` on what `data_loader(args, kv)` returns: iterators of training and validation."""
    kv = mx.kvstore.create(args.kv_store)
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)-15s Node[{kv.rank}] %(message)s",
        force=True,
    )
    log.info("start with arguments %s", args)
    train, validation = data_loader(args, kv)

    symbol, arg_params, aux_params = _load(args, kv.rank)
    if symbol is not None:
        assert symbol.tojson() == network.tojson(), "the checkpoint is of another network"

    checkpoint = None
    if args.model_prefix:
        prefix = args.model_prefix if kv.rank == 0 else f"{args.model_prefix}-{kv.rank}"
        checkpoint = mx.callback.do_checkpoint(prefix)
    rate, scheduler = _lr_scheduler(args, kv)
    options = {"learning_rate": rate, "wd": args.wd, "lr_scheduler": scheduler}
    if args.optimizer in {"sgd", "nag"}:
        options["momentum"] = args.mom
    monitor = mx.mon.Monitor(args.monitor, pattern=".*weight") if args.monitor > 0 else None

    contexts = [mx.cpu(number) for number in range(args.devices)]
    model = mx.mod.Module(context=contexts, symbol=network)
    model.fit(
        train,
        begin_epoch=args.load_epoch or 0,
        num_epoch=args.num_epochs,
        eval_data=validation,
        eval_metric=["accuracy", mx.metric.create("ce")],
        kvstore=kv,
        optimizer=args.optimizer,
        optimizer_params=options,
        initializer=mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
        arg_params=arg_params,
        aux_params=aux_params,
        batch_end_callback=[mx.callback.Speedometer(args.batch_size, args.disp_batches)],
        epoch_end_callback=checkpoint,
        allow_missing=True,
        monitor=monitor,
    )
    return model
