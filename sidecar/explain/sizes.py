"""Wording of a request's size: the tokens that it entered with, where they come from, and how its lease moved."""

from __future__ import annotations

import math

from sidecar.explain.document import Explanation, RequestFacts, SizeDetails
from sidecar.telemetry.ahead import counted, times

MAXIMUM = "maximum"


def entered(story: Explanation) -> str | None:
    """The tokens that it entered with, and why so many, in a sentence; None where no output length is learned."""
    asked, size = story.asked, story.size
    if asked is None or size is None:
        return None
    prompt = f"prompt {size.prompt_tokens:,}"
    if size.bytes_per_token is not None:
        prompt += f" (at {size.bytes_per_token:.1f} bytes a token)"
    output = f"{size.output_tokens:,}" if size.sequences == 1 else f"{size.sequences:,} x {size.output_tokens:,}"
    parts = f"{prompt}, output {output} ({_source(story, asked, size)})"
    return f"{_verb(story)} {counted(asked.tokens, 'token')}: {parts}{_overlap(asked, size)}{_old_rule(asked, size)}"


def _verb(story: Explanation) -> str:
    if story.dry_run is not None:
        return "It would have entered with"
    return "It asked for" if story.admitted is None and not story.preempted else "It entered with"


def _source(story: Explanation, asked: RequestFacts, size: SizeDetails) -> str:
    of = f"tenant {asked.tenant} on {story.path}, {_model(asked)}, bucket `{size.bucket}`"
    part, answers = f"{100 * size.quantile:.4g}%", counted(size.samples, "answer")
    match size.source:
        case "own":
            return f"{part} of {answers} of {of}"
        case "tenants":
            return (
                f"{part} of the answers of the median tenant, of {answers} on {story.path}; "
                f"too few are known of tenant {asked.tenant} itself, {_model(asked)}, bucket `{size.bucket}`"
            )
        case "maximum":
            most = "its max_tokens" if asked.max_output_tokens is not None else "the most that the policy assumes"
            return f"{most}: too few answers are known of {of}"
        case other:
            return f"{other}, {answers} of {of}"


def _model(asked: RequestFacts) -> str:
    return "no model" if asked.model is None else f"model {asked.model}"


def _overlap(asked: RequestFacts, size: SizeDetails) -> str:
    text = f", counted at {size.overlap:.3g} because requests end at different times" if size.overlap < 1 else ""
    plain = size.prompt_tokens + size.sequences * size.output_tokens
    is_cut = math.floor(plain * size.overlap) > asked.tokens
    return f"{text}, and no more than one request of its tier may hold" if is_cut else text


def _old_rule(asked: RequestFacts, size: SizeDetails) -> str:
    if size.source == MAXIMUM and size.overlap >= 1:
        return ""
    rule = "max_tokens" if asked.max_output_tokens is not None else "the output that the policy assumes"
    return f"; {rule} would have held {size.most_tokens:,}"


def moved(story: Explanation) -> str | None:
    """Sentence on what its lease held at its end and what it really used; None where that is not known."""
    size, ended = story.size, story.ended
    if size is None or ended is None or size.held_tokens is None:
        return None
    grew = f" after it grew {times(size.growths)}" if size.growths else ", and never grew"
    by = "by the engine's count" if ended.output_tokens is not None else "by our estimate"
    output = "" if ended.output_tokens is None else f", {ended.output_tokens:,} of them output"
    return f"It held {size.held_tokens:,} at its end{grew}. It really used {ended.tokens_used:,}{output}, {by}"
