"""A picture of a race of PyTorch jobs: the loss against time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["draw_losses"]

_COLOURS: Final = {
    "ddp-gloo": "#9aa5b1",
    "ddp-netstorm": "#7fb2d9",
    "ddp-codec": "#55c2c3",
    "diloco-gloo": "#d58a3a",
    "diloco-torchft": "#c44e52",
    "diloco-hivemind": "#8a63a8",
    "diloco-netstorm": "#2b6ca3",
    "diloco-streaming": "#17406b",
    "ddp-network-free": "#b8d8b0",
    "diloco-network-free": "#4f9a45",
    "diloco-streaming-network-free": "#2f6b28",
}


def draw_losses(content: Mapping[str, Any], path: Path) -> None:
    """Draw the systems that have trained (needs matplotlib); the format is that of the file name.

    Args:
        content: of the JSON file of `train.py --framework torch`.
        path: where to.
    """
    from matplotlib import rc_context  # noqa: PLC0415 - not everybody has it
    from matplotlib.figure import Figure  # noqa: PLC0415

    rows = [row for row in content["results"] if len(row["points"]) > 1]
    with rc_context({"svg.hashsalt": "netstorm", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for row in rows:
            times = [point["seconds"] for point in row["points"]]
            losses = [point["loss"] for point in row["points"]]
            axes.plot(
                times, losses, marker="o", markersize=3, color=_COLOURS[row["system"]], label=row["system"]
            )
        axes.axhline(content["options"]["target"], color="#333333", linestyle="--", linewidth=0.8)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("loss on held-out text, nats a character")
        axes.legend(frameon=False, loc="upper right")
        axes.spines[["top", "right"]].set_visible(False)
        size = f"a GPT of {4e-6 * rows[0]['parameters']:.1f} MB"
        scale = content["options"]["rates_scale"]
        figure.suptitle(f"{Path(content['network']).stem}, rates x {scale:g}, {size}", fontsize=10)
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else {})
