"""A decoder of the Llama kind with random weights, in plain PyTorch, with a cache of fixed places.

Nothing is downloaded. The sizes of `LARGE` are those of Llama 3 8B. What it generates is noise: the work of the device
is that of a trained model, since no request ends before the tokens that it asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shape of a decoder. `heads` of queries share `key_heads`."""

    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int

    @property
    def head(self) -> int:
        """The width of one head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        attention = 2 * self.width * self.width + 2 * self.width * self.head * self.key_heads
        return (
            self.layers * (attention + 3 * self.width * self.inner + 2 * self.width) + 2 * self.vocabulary * self.width
        )

    def bytes_needed(self, places: int, longest: int) -> int:
        """Of the device's memory, at 2 bytes a number: weights, cache, and a tenth more for what is computed."""
        cache = 2 * self.layers * places * longest * self.key_heads * self.head
        return round(2 * (self.parameters + cache) * 1.1)


LARGE = Sizes(layers=32, width=4096, heads=32, key_heads=8, inner=14336, vocabulary=128256)
TINY = Sizes(layers=2, width=64, heads=4, key_heads=2, inner=128, vocabulary=512)


class CannotRun(Exception):
    """There is no device, or too little of its memory. The message is one line."""


class Decoder:
    """See `engine.Model`."""

    def __init__(self, sizes: Sizes, places: int, longest: int, device: str) -> None:
        self._torch = torch = _imported()
        _check(torch, sizes, places, longest, device)
        self._sizes, self._device, self._longest = sizes, device, longest
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(1)
        width, head = sizes.width, sizes.head
        self._embedding = self._random(sizes.vocabulary, width)
        self._layers = [
            {
                "queries": self._random(width, width),
                "keys": self._random(head * sizes.key_heads, width),
                "values": self._random(head * sizes.key_heads, width),
                "out": self._random(width, width),
                "gate": self._random(sizes.inner, width),
                "up": self._random(sizes.inner, width),
                "down": self._random(width, sizes.inner),
            }
            for _ in range(sizes.layers)
        ]
        self._head = self._random(sizes.vocabulary, width)
        cache = (sizes.layers, places, sizes.key_heads, longest, head)
        self._keys = torch.zeros(cache, device=device, dtype=self._dtype)
        self._values = torch.zeros(cache, device=device, dtype=self._dtype)
        self._lengths = [0] * places
        turns = torch.arange(0, head, 2, device=device, dtype=torch.float32) / head
        angles = torch.arange(longest, device=device, dtype=torch.float32)[:, None] * (500_000.0**-turns)[None, :]
        self._cosine, self._sine = angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def prefill(self, place: int, prompt: Sequence[int]) -> int:
        """See `engine.Model`."""
        torch = self._torch
        with torch.inference_mode():
            self._lengths[place] = 0
            tokens = torch.tensor([prompt], device=self._device)
            positions = torch.arange(len(prompt), device=self._device)[None, :]
            state = self._through(tokens, positions, [place])
            self._lengths[place] = len(prompt)
            return int(self._next(state[:, -1])[0])

    def decode(self, places: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        """See `engine.Model`."""
        torch = self._torch
        with torch.inference_mode():
            positions = torch.tensor([[self._lengths[place]] for place in places], device=self._device)
            state = self._through(torch.tensor(tokens, device=self._device)[:, None], positions, places)
            for place in places:
                self._lengths[place] += 1
            found: list[int] = self._next(state[:, -1]).tolist()  # waits for the device
            return found

    def _through(self, tokens: Any, positions: Any, places: Sequence[int]) -> Any:
        """The last layer's state of each token. Its keys and values are written into the cache."""
        torch, functional, sizes = self._torch, self._torch.nn.functional, self._sizes
        batch, length = tokens.shape
        rows = torch.tensor(places, device=self._device)
        seen = max(self._lengths[place] for place in places) + length
        mask = (torch.arange(seen, device=self._device)[None, None, :] <= positions[:, :, None])[:, None]
        cosine, sine = self._cosine[positions][:, None], self._sine[positions][:, None]
        state = functional.embedding(tokens, self._embedding)
        for number, weights in enumerate(self._layers):
            normed = _normed(torch, state)
            queries = functional.linear(normed, weights["queries"]).view(batch, length, sizes.heads, -1).transpose(1, 2)
            keys = functional.linear(normed, weights["keys"]).view(batch, length, sizes.key_heads, -1).transpose(1, 2)
            values = functional.linear(normed, weights["values"]).view(batch, length, sizes.key_heads, -1)
            own_keys, own_values = self._keys[number], self._values[number]
            own_keys[rows[:, None], :, positions] = _turned(torch, keys, cosine, sine).transpose(1, 2)
            own_values[rows[:, None], :, positions] = values
            repeats = sizes.heads // sizes.key_heads
            mixed = functional.scaled_dot_product_attention(
                _turned(torch, queries, cosine, sine),
                own_keys[rows, :, :seen].repeat_interleave(repeats, dim=1),
                own_values[rows, :, :seen].repeat_interleave(repeats, dim=1),
                attn_mask=mask,
            )
            state = state + functional.linear(mixed.transpose(1, 2).reshape(batch, length, -1), weights["out"])
            normed = _normed(torch, state)
            inner = functional.silu(functional.linear(normed, weights["gate"])) * functional.linear(
                normed, weights["up"]
            )
            state = state + functional.linear(inner, weights["down"])
        return state

    def _next(self, state: Any) -> Any:
        return self._torch.nn.functional.linear(_normed(self._torch, state), self._head).argmax(-1)

    def _random(self, rows: int, columns: int) -> Any:
        made = self._torch.randn(rows, columns, device=self._device, dtype=self._dtype)
        return made.mul_(1 / math.sqrt(columns))


def _normed(torch: Any, state: Any) -> Any:
    scale = torch.rsqrt(state.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return (state.float() * scale).to(state.dtype)


def _turned(torch: Any, heads: Any, cosine: Any, sine: Any) -> Any:
    """Rotary position embedding (RoFormer, arXiv:2104.09864), with the halves of a head as pairs."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _imported() -> Any:
    try:
        import torch
    except ImportError:
        raise CannotRun("PyTorch is not installed here; run it with a Python that has it") from None
    return torch


def _check(torch: Any, sizes: Sizes, places: int, longest: int, device: str) -> None:
    if device != "cuda":
        return
    if not torch.cuda.is_available():
        raise CannotRun("PyTorch finds no CUDA device; run it on a machine with a GPU, or with --device cpu --tiny")
    needed, free = sizes.bytes_needed(places, longest), torch.cuda.mem_get_info()[0]
    if needed > free:
        raise CannotRun(
            f"the model needs {needed / 2**30:.1f} GiB of the device's memory, and {free / 2**30:.1f} GiB are free; "
            "give fewer --layers or --places"
        )


def device_name(device: str) -> str:
    """What the device calls itself."""
    torch = _imported()
    return str(torch.cuda.get_device_name()) if device == "cuda" else "CPU"
