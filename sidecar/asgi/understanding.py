"""What a request asks for, in one value: whose it is, its tier, its size, and the body it came with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sidecar.apis import Api
from sidecar.asgi.background import refuse_background
from sidecar.asgi.credentials import Credentials
from sidecar.asgi.output_cap import cap_of, capped
from sidecar.asgi.types import Scope
from sidecar.classify import Asked, Classification, Classifier
from sidecar.engines.registry import client_headers
from sidecar.errors import InvalidBody, InvalidHeader, TooManyChoices, UnsizedPrompt
from sidecar.events import Headers
from sidecar.payload import Payload, read
from sidecar.policy.model import Endpoint, Policy, Tenant, Unsized
from sidecar.policy.rules import UNLIMITED
from sidecar.policy.units import duration_s
from sidecar.pools import Ask
from sidecar.tokens import Estimator, tokens_to_hold

MAX_WAIT_HEADER = b"x-admission-max-wait"
ATTEMPT_HEADER = b"x-stainless-retry-count"
"""What OpenAI's and Anthropic's clients send: how often they have tried this request before."""
_END_BYTES = 2048
_LONGEST_LENGTH = 18
"""Digits of a Content-Length: an exabyte."""


class Understood(msgspec.Struct):
    """A request that is in order. `tokens` is what it will hold, `prompt_tokens` the estimate of its prompts.

    `taken` are the names of the client's headers that must not pass on, `added` what the engine gets beside the rest.
    `output_cap` is the maximum that its body must be given, because it names none and its tenant has one.
    """

    body: bytes
    headers: Mapping[bytes, bytes]
    payload: Payload
    classification: Classification
    taken: Sequence[bytes]
    added: Headers
    prompt_tokens: int
    tokens: int
    api: Api
    output_cap: int | None = None

    @property
    def requests(self) -> int:
        """What it will hold beside its tokens: a sequence for every choice of every prompt."""
        return self.payload.prompts * self.payload.choices

    def ask(self) -> Ask:
        """What it asks of the pool."""
        tenant, level = self.classification.tenant, self.classification.level
        is_counted = tenant.limits.are_counted
        return Ask(
            level,
            tenant.name,
            tenant.weight,
            self.tokens,
            self.requests,
            request=_told_from_others(tenant.name, self.body),
            attempt=_attempt(self.headers),
            limits=tenant.limits if is_counted else None,
            downgrade=tenant.downgrade_level if is_counted else None,
        )

    def hold_at_least(self, most_tokens: int) -> None:
        """Lets it hold the most that it may, as its prompt cannot be sized. Unbounded tokens are not counted."""
        if most_tokens < UNLIMITED:
            self.tokens = max(self.tokens, most_tokens)

    def drop_body(self) -> None:
        """Keeps what it asks for, not what it says: whoever passes nothing on need not hold megabytes."""
        self.body = b""
        self.payload.text = str

    def body_to_forward(self) -> bytes:
        """The client's body, with its tenant's cap where it needs one."""
        return self.body if self.output_cap is None else capped(self.api, self.body, self.output_cap)


class Intake:
    """Understands requests by one policy. One per door."""

    def __init__(
        self, policy: Policy, classifier: Classifier, estimator: Estimator, engine_key: bytes | None = None
    ) -> None:
        self._policy = policy
        self._classifier = classifier
        self._estimator = estimator
        self.credentials = Credentials(policy.forward_key, engine_key)
        self.has_tokenizer = estimator.counter is not None

    def tenant(self, headers: Mapping[bytes, bytes]) -> Tenant:
        """Whose request it is. Raises InvalidApiKey, before a byte of the body is read."""
        return self._classifier.tenant(headers)

    def understand(self, endpoint: Endpoint, headers: Mapping[bytes, bytes], tenant: Tenant, body: bytes) -> Understood:
        """Reads a body, and sizes its prompts by their bytes. Raises a BadRequest for what is wrong with it."""
        _refuse_other_encodings(body)
        payload = read(endpoint.api, body)
        refuse_background(payload, self._policy.background)
        taken = client_headers(headers)
        classification = self._classifier.classify(Asked(endpoint, payload, headers, taken), tenant)
        refuse_what_is_too_much(endpoint.api, payload, self._policy)
        cap = cap_of(endpoint.api, payload, body, tenant, self._policy.engine)
        prompt_tokens = self._estimator.prompt_tokens(payload, tenant.name)
        tokens = tokens_to_hold(payload, prompt_tokens, self._default_output_tokens(classification.level, cap))
        keys = self.credentials
        return Understood(
            body=body,
            headers=headers,
            payload=payload,
            classification=classification,
            taken=[*taken, *keys.taken(headers)],
            added=keys.added,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            api=endpoint.api,
            output_cap=cap,
        )

    async def count(self, understood: Understood) -> None:
        """Sizes the prompts by the tokenizer instead, where there is one."""
        if self._estimator.counter is None:
            return
        payload, level = understood.payload, understood.classification.level
        understood.prompt_tokens = await self._estimator.counted_prompt_tokens(payload, self._estimator.counter)
        output_tokens = self._default_output_tokens(level, understood.output_cap)
        understood.tokens = tokens_to_hold(payload, understood.prompt_tokens, output_tokens)

    def _default_output_tokens(self, level: int, cap: int | None) -> int:
        default = self._policy.tiers[level].default_output_tokens
        return default if cap is None else min(default, cap)


def refuse_what_is_too_much(api: Api, payload: Payload, policy: Policy) -> None:
    """Raises TooManyChoices or UnsizedPrompt for what the policy lets no request ask for.

    What is bounded is their product: each prompt of a list starts that many choices. Embeddings generate nothing.
    """
    sequences, most = payload.prompts * payload.choices, policy.max_choices
    if sequences > most and api is not Api.EMBEDDINGS:
        raise TooManyChoices(
            f"this request would start {sequences} sequences (choices times prompts: {payload.choices} x "
            f"{payload.prompts}); {most} are allowed; ask for a smaller n or best_of, or send fewer prompts at once"
        )
    if payload.unsized is not None and policy.unsized is Unsized.REFUSE:
        raise UnsizedPrompt(
            f"{payload.unsized}: the size of the prompt that it stands for is not known here; send that prompt itself, "
            "or ask the operator for `unsized: hold`"
        )


def _told_from_others(tenant: str, body: bytes) -> int:
    # The ends of a long body: a prompt begins with what many share, and ends with what is new.
    return hash((tenant, len(body), body[:_END_BYTES], body[-_END_BYTES:]))


def _attempt(headers: Mapping[bytes, bytes]) -> int | None:
    raw = headers.get(ATTEMPT_HEADER)
    return int(raw) if raw is not None and len(raw) <= _LONGEST_LENGTH and raw.isdigit() else None


def _refuse_other_encodings(body: bytes) -> None:
    """What `payload.read` skips over it does not decode: it would fail behind the admission, or at the engine."""
    if body.isascii():
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidBody(f"the body is not UTF-8 (byte {error.start}); send JSON in UTF-8") from None


def declared_length(scope: Scope, headers: Mapping[bytes, bytes]) -> int | None:
    """The Content-Length in bytes, None without one. Raises InvalidHeader where it contradicts itself."""
    given = headers.get(b"content-length")
    if given is None:
        return None
    has_repeats = len(headers) != len(scope["headers"])
    if (has_repeats and _is_ambiguous(scope)) or not given.isdigit() or len(given) > _LONGEST_LENGTH:
        raise InvalidHeader("content-length is given twice, or is no number of bytes; send it once")
    if b"transfer-encoding" in headers:  # whoever sits behind us might believe the other one
        raise InvalidHeader("content-length and transfer-encoding exclude each other; send one of them")
    return int(given)


def _is_ambiguous(scope: Scope) -> bool:
    return len({value for name, value in scope["headers"] if name == b"content-length"}) > 1


def longest_wait_s(headers: Mapping[bytes, bytes], of_tier_s: float | None) -> float | None:
    """The tier's longest wait in seconds; a client may shorten it. Raises InvalidHeader for what is no duration."""
    raw = headers.get(MAX_WAIT_HEADER)
    if raw is None:
        return of_tier_s
    try:
        asked_s = float(duration_s(raw.decode("latin-1").strip()))
    except ValueError as error:
        raise InvalidHeader(f"{MAX_WAIT_HEADER.decode()}: {error}") from None
    return asked_s if of_tier_s is None else min(asked_s, of_tier_s)
