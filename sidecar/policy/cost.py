"""Weights of tokens: what counts in limits, budgets and fair shares. What a lease holds is never weighted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import ValidationInfo, field_validator

from sidecar.policy import fields as of
from sidecar.policy.declared import ReadAs, declared, figures, key

THOUSANDTHS = 1000
"""Weights are whole numbers of thousandths, so that every replica counts the same."""


@dataclass(frozen=True, slots=True)
@declared
class TokenCost:
    """Weights of a model's tokens. The sum of a request is rounded up."""

    input_thousandths: of.TokenWeight = key("1", "A token of the prompt.", 1)
    cached_thousandths: Annotated[int, ReadAs(of.TokenWeight | None)] = key(
        None,
        "A token of the prompt that the engine's prefix cache had, as its answer says. Default: that of `input`.",
        0.1,
        is_always_read=True,
    )
    output_thousandths: of.TokenWeight = key("1", "A token of the answer.", 4)

    @field_validator("cached_thousandths")
    @classmethod
    def _as_input(cls, cached: int | None, info: ValidationInfo) -> int:
        return int(info.data.get("input_thousandths", THOUSANDTHS)) if cached is None else cached

    @classmethod
    def plain(cls) -> TokenCost:
        """The weights with which each token counts as one."""
        return cls(THOUSANDTHS, THOUSANDTHS, THOUSANDTHS)

    @property
    def is_plain(self) -> bool:
        """True if each token counts as one."""
        return self == TokenCost.plain()

    def __str__(self) -> str:
        """The weights in the file's words."""
        return ", ".join(f"{name} {weight:g}" for name, weight in figures(self).items())

    def of(self, prompt: int, cached: int, output: int) -> int:
        """The count for a prompt, of which the cache had so many tokens, and an answer."""
        cached = min(cached, prompt)
        counted = (prompt - cached) * self.input_thousandths + cached * self.cached_thousandths
        return -(-(counted + output * self.output_thousandths) // THOUSANDTHS)


class RequestCost(NamedTuple):
    """The weights of one request, whose estimated prompts have so many tokens. It keeps them to its end.

    What the cache will have is not known before its answer.
    """

    weights: TokenCost
    prompt: int

    def of(self, tokens: int) -> int:
        """The count for so many tokens, of which those beyond the prompt are the answer's."""
        prompt = min(tokens, self.prompt)
        return self.weights.of(prompt, 0, tokens - prompt)

    def in_turns(self, tokens: int) -> int:
        """The count in fair shares: at least one, so that tenants take turns where nothing counts."""
        return max(1, self.of(tokens))

    def most_in_turns(self, tokens: int) -> int:
        """The most that so many tokens can count for in fair shares, whatever an engine says of them."""
        weights = self.weights
        most = max(weights.input_thousandths, weights.cached_thousandths, weights.output_thousandths)
        return max(1, -(-tokens * most // THOUSANDTHS))
