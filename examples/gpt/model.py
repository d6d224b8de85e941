"""A GPT of characters, as small as it gets: token and place embeddings, blocks, a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpt.text import CHARACTERS

__all__ = ["GPT"]


class Block(nn.Module):
    """Attention to what comes before, and a small network for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_network = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the block's output: (samples, characters, width) as its input."""
        samples, length, width = values.shape
        parts = self.queries_keys_values(self.before_attention(values)).chunk(3, dim=-1)
        queries, keys, contents = (
            part.view(samples, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        found = functional.scaled_dot_product_attention(queries, keys, contents, is_causal=True)
        values = values + self.projection(found.transpose(1, 2).reshape(samples, length, width))
        output: torch.Tensor = values + self.network(self.before_network(values))
        return output


class GPT(nn.Module):
    """Predicts the next character. Its parts `embedding`, `blocks` and `head` can be trained as fragments."""

    def __init__(self, *, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict(
            {"characters": nn.Embedding(CHARACTERS, width), "places": nn.Embedding(context, width)}
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        """Return the mean cross-entropy of the characters to predict, in nats.

        Args:
            inputs: numbers of characters: (samples, characters).
            targets: for each, the one that follows.
        """
        places = torch.arange(inputs.shape[1], device=inputs.device)
        values = self.embedding["characters"](inputs) + self.embedding["places"](places)
        for block in self.blocks:
            values = block(values)
        return functional.cross_entropy(self.head(values).flatten(0, 1), targets.flatten())
