"""Request intake: a request's headers and body become a classified and sized request, or a refusal.

The intake does no I/O. Enforcing and the dry run feed it the same messages, so both run the same checks in the same
order: no loop, one API key, a known key, its codings, the declared length, the body's time and size, its fields, the
background rule, the tier, the number of choices, the output maximum, the longest wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace
from starlette.types import Message, Scope

from sidecar.admission.policy_snapshot import KEY_HEADERS, PolicySnapshot
from sidecar.admission.via import refuse_loop
from sidecar.apis import Api
from sidecar.engines import Engine
from sidecar.engines.registry import client_headers
from sidecar.errors import (
    BackgroundNotAllowed,
    BodyTimeout,
    BodyTooLarge,
    InvalidBody,
    InvalidHeader,
    OutputTooLong,
    TooManyChoices,
    UnsizedPrompt,
)
from sidecar.events import Headers
from sidecar.gain.token_deadlines import SLO_HEADERS, Objective, asked_slo
from sidecar.identity.classify import Asked, Classification
from sidecar.lengths.lease_size import Expected, LeaseSizes
from sidecar.lengths.token_estimates import tokens_to_hold
from sidecar.payload.decode import Payload, decode
from sidecar.payload.edit import remove
from sidecar.policy.choices import Background, Unsized
from sidecar.policy.cost import RequestCost, TokenCost
from sidecar.policy.endpoint import Endpoint
from sidecar.policy.model import Policy
from sidecar.policy.rules import UNLIMITED
from sidecar.policy.tenant import Account, Tenant
from sidecar.policy.units import duration_s
from sidecar.pools import Ask, Pool
from sidecar.scheduling.tickets import TicketGain

if TYPE_CHECKING:
    from sidecar.admission.model_names import ModelNames
    from sidecar.admission.request_gain import GainMeter
    from sidecar.payload.content_codings import PackedBody

MAX_WAIT_HEADER, DEADLINE_HEADER = b"x-admission-max-wait", b"x-admission-deadline"
CONTENT_ENCODING = b"content-encoding"
NOT_PACKED = (b"accept-encoding", b"identity")
"""No answer may be compressed: its usage is read, and it may have begun as plain text."""
_NO_BODY = Payload(None, False)
ATTEMPT_HEADER = b"x-stainless-retry-count"
"""Header of OpenAI's and Anthropic's clients: how often the client has tried this request before."""
_UPLOADS = re.compile(
    rb"multipart/form-data|application/(x-www-form-urlencoded|octet-stream)|(audio|image|video)/", re.IGNORECASE
)
_END_BYTES = 256
"""Of each end of a body: prompts often share their beginning, and differ at their end."""
_LONGEST_LENGTH = 18
"""Digits of a Content-Length: an exabyte."""

MAXIMUM_FIELDS = {
    Api.CHAT: ("max_completion_tokens", "max_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
    Api.MESSAGES: ("max_tokens",),
}
"""Where each API names the output maximum of a choice; the first field is written. Embeddings have no output."""


class SizedRequest(msgspec.Struct, frozen=True, gc=False):
    """A valid request: its tenant and tier (`classification`), its size, and its body. It never changes.

    Its turn has the present one in its place: the pool may charge another tier, and more is known while it waits.

    `tokens` and `requests` (sequences) are what it will hold in the pool, `prompt_tokens` the estimate of its prompts,
    `assumed_output` the most tokens of one sequence: the client's maximum, or what the policy assumes where it sets
    none. `expected` is what it is expected to use, None before it enters the pool and where nothing is learned.
    `stripped` names the client's headers that must not be forwarded, `added` are headers for the engine. `output_cap`
    is the output maximum that is written into the body, because the body has none and the tenant has a limit.
    `max_wait_s` is the longest wait that the client allows. `deadline_us` is until when it may wait instead of its
    tier's `max_wait`, by the pool's clock, None for a request without a deadline. `objective` is its tier's, as the
    client loosens it, None where its gain is not measured. `gain` are its figures where the pool orders by gain. `path`
    is the endpoint's. `hits` are the prompt's tokens that engines are predicted to have, by their ids; None in a pool
    of one engine. `token_cost` has the weights of its tokens, None where each counts as one; `beside` are the accounts
    beside its tenant's own. The body of one that `is_unread` passes as it comes. Its hash says whether a client sends
    it again: `Ask.request`. `engine_model` is the model's name at the engine, where that is another.
    """

    headers: Mapping[bytes, bytes]
    payload: Payload
    classification: Classification
    api: Api
    path: str
    prompt_tokens: int
    tokens: int
    assumed_output: int
    requests: int = 1
    stripped: Sequence[bytes] = ()
    added: Headers = ()
    output_cap: int | None = None
    max_wait_s: float | None = None
    hits: tuple[tuple[str, int], ...] | None = None
    expected: Expected | None = None
    objective: Objective | None = None
    gain: TicketGain | None = None
    is_unread: bool = False
    engine_model: str | None = None
    deadline_us: int | None = None
    token_cost: TokenCost | None = None
    beside: tuple[Account, ...] = ()

    def __hash__(self) -> int:
        """Equal when its tenant sends the same body again, while that is kept. Hardly any request is asked."""
        body = self.payload.body
        return hash((self.classification.tenant.name, len(body), body[:_END_BYTES], body[-_END_BYTES:]))

    @property
    def body(self) -> bytes:
        """The body as it came, but unpacked; empty once it is dropped."""
        return self.payload.body

    @property
    def most_tokens(self) -> int:
        """The most tokens that it may use: prompt and maximum output."""
        return self.tokens if self.expected is None else self.expected.most

    def expecting(self, sizes: LeaseSizes, pool: Pool) -> SizedRequest:
        """With the size that it is expected to use in the pool, as far as that is known now."""
        payload, before = self.payload, self.expected
        bound = payload.max_output_tokens if self.output_cap is None else self.output_cap
        expected = sizes.expect(
            self.classification.tenant.name,
            self.path,
            payload,
            self.prompt_tokens,
            self.tokens if before is None else before.most,
            self.assumed_output,
            bound,
            pool.most_tokens(self.classification.level) if bound is None else 0,
        )
        return self if expected is None else replace(self, expected=expected, tokens=expected.tokens)

    def charged(self, level: int) -> SizedRequest:
        """With the level that the pool charges, or whose queue is full."""
        return replace(self, classification=self.classification.charged(level))

    def with_charges(self, names: ModelNames) -> SizedRequest:
        """With the weights of its tokens, and the accounts beside its tenant's own."""
        model = self.payload.model
        return replace(self, token_cost=names.cost(model), beside=names.accounts(self.classification.tenant, model))

    def ask(self) -> Ask:
        """The request's ask of the pool."""
        tenant, hits, most = self.classification.tenant, self.hits, self.most_tokens
        accounts: tuple[Account, ...] = (tenant.account,) if tenant.limits.are_counted else ()
        if self.beside:
            accounts += tuple(account for account in self.beside if account.limits.are_counted)
        user, users, cost = None, tenant.users, self.token_cost
        if users is not None:
            name = "" if self.classification.user is None else self.classification.user.key
            user = name if users.fair else None
            accounts += (users.account(tenant.name, name),) if users.limits.are_counted else ()
        return Ask(  # with more than 15 names Python would make a dict of them
            self.classification.level,
            tenant.name,
            weight=tenant.weight,
            tokens=self.tokens,
            requests=self.requests,
            request=self,
            attempt=_attempt(self.headers),
            accounts=accounts,
            downgrade=tenant.downgrade_level if accounts else None,
            prompt=0 if hits is None else min(self.prompt_tokens, most),
            hits=hits or (),
            most=most,
            gain=self.gain,
            is_deferred=self.deadline_us is not None,
            cost=None if cost is None else RequestCost(cost, self.prompt_tokens * self.payload.choices),
            user=user,
        )

    def longest_wait_s(self, policy: Policy) -> float | None:
        """The longest wait in seconds: the tier's, or the client's where that is shorter. None: no limit.

        The tier's does not count where the request has a deadline.
        """
        if self.deadline_us is not None:
            return self.max_wait_s
        waits_s = (self.max_wait_s, policy.tiers[self.classification.level].queue.max_wait_s)
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    @property
    def may_be_repeated(self) -> bool:
        """True if it may be preempted before its first byte, where its tier is preemptible."""
        # The engine would run a preempted background response to its end, and then a second time. An upload that has
        # begun to pass cannot be sent again.
        return not self.payload.background and not self.is_unread

    def list_size(self, pool: Pool) -> int:
        """The requests that a list of prompts or inputs holds: at most what its tier admits.

        The tier that its tenant's requests fall to counts, too.
        """
        level, lower = self.classification.level, self.classification.tenant.downgrade_level or 0
        return self.payload.requests(min(pool.most_requests(level), pool.most_requests(max(level, lower))))


class RequestIntake(msgspec.Struct, eq=False):
    """The intake of one request. Call `check_head` first, then `feed` every message; each raises a refusal.

    `tenant` is the request's tenant, None until its key is known; `classification` is there once its body is read.
    `trace` gets what the classification is made from, just before, for who explains it. `is_whole`: the end of the body
    has come, wherever it was refused.
    """

    _snapshot: PolicySnapshot
    _endpoint: Endpoint
    _headers: Mapping[bytes, bytes]
    _received_us: int
    tenant: Tenant | None = None
    _unread_keys: tuple[str, ...] = ()
    classification: Classification | None = None
    _packed: PackedBody | None = None
    _chunks: list[bytes] = []
    _size: int = 0
    is_whole: bool = False
    trace: Callable[[Asked, Tenant], None] | None = None
    _deadline_us: int | None = None

    def check_head(self, pairs: Headers, scope: Scope) -> None:
        """Checks the way here, the key and the declared length, before a byte of the body is read.

        `pairs` are the headers as they came. A key in another place than those that are read is looked for, in the
        query too, only where there is no known key.
        """
        headers, snapshot = self._headers, self._snapshot
        if b"via" in headers:
            refuse_loop(headers[b"via"])
        if len(headers) != len(pairs):  # one of them is given twice
            refuse_two_keys(pairs, headers, snapshot)
            once = snapshot.policy.tier_header, MAX_WAIT_HEADER, DEADLINE_HEADER, *SLO_HEADERS
            _refuse_two_values(pairs, once)
        self.tenant = tenant = snapshot.classifier.tenant(headers, scope, pairs)
        if tenant is snapshot.policy.anonymous:
            self._unread_keys = snapshot.classifier.unread(headers, scope.get("query_string", b""))
        if DEADLINE_HEADER in headers:
            from sidecar.admission.deadline import asked_deadline_us

            self._deadline_us = asked_deadline_us(headers[DEADLINE_HEADER], self._received_us)
        if CONTENT_ENCODING in headers and not self._is_upload:
            from sidecar.payload.content_codings import packed_body

            self._packed = packed_body(pairs, snapshot.policy.max_body_bytes)
        if b"content-length" in headers and _declared_length(pairs, headers) > self._most_bytes():
            raise self._too_large()

    def feed(self, message: Message, now_us: int) -> SizedRequest | None:
        """Takes an `http.request` message. Returns the request once its body is complete; that of an upload at once."""
        policy, endpoint = self._snapshot.policy, self._endpoint
        if endpoint.size is not None and is_upload(self._headers):
            return self.unread()
        if now_us - self._received_us > policy.body_timeout_s * 1e6:
            raise self._too_late()
        body, packed = message.get("body", b""), self._packed
        self.is_whole = not message.get("more_body", False)
        if packed is not None:
            body = packed.feed(body, is_last=self.is_whole)
        if self._size + len(body) > policy.max_body_bytes:
            raise self._too_large()
        if not self.is_whole:
            self._chunks.append(body)
            self._size += len(body)
            return None
        if self._chunks or type(body) is not bytes:
            body = b"".join((*self._chunks, body))
            self._chunks.clear()
        if not body.isascii():
            _refuse_other_text(body)
        payload = decode(endpoint.api, body)
        payload.body = body
        return self._sized(payload, len(body), () if packed is None else (CONTENT_ENCODING,))

    def unread(self) -> SizedRequest:
        """The request of the generic API whose body is not read here: an upload passes as it comes.

        Raises InvalidHeader where its size is not declared.
        """
        length = self._headers.get(b"content-length")
        if length is None:
            raise InvalidHeader("content-length: missing; an upload here must say its size, and not come in chunks")
        return self._sized(decode(self._endpoint.api, b"{}"), int(length), is_unread=True)

    def check_time(self, now_us: int) -> None:
        """Raises BodyTimeout where the body has taken longer than the policy's `body_timeout`."""
        if now_us - self._received_us > self._snapshot.policy.body_timeout_s * 1e6:
            raise self._too_late()

    @property
    def tier(self) -> str | None:
        """The name of its tier: of one that ends before its body says more, the tier that its path and key give it.

        None until its key is known.
        """
        found, snapshot = self.classification, self._snapshot
        if found is None:
            if self.tenant is None:
                return None
            found = snapshot.classifier.classify(Asked(self._endpoint, _NO_BODY, {}, ()), self.tenant)
        return snapshot.policy.tiers[found.level].name

    @property
    def _is_upload(self) -> bool:
        return self._endpoint.size is not None and is_upload(self._headers)

    def _most_bytes(self) -> int:
        """The largest body that is taken, and that of an upload where it has a bound of its own."""
        policy = self._snapshot.policy
        if policy.max_upload_bytes is None or not self._is_upload:
            return policy.max_body_bytes
        return policy.max_upload_bytes

    def _too_late(self) -> BodyTimeout:
        most_s = self._snapshot.policy.body_timeout_s
        return BodyTimeout(f"the body did not arrive within {most_s:g} s; send it faster")

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than the {self._most_bytes()} bytes allowed here; send less")

    def _sized(
        self, payload: Payload, size: int, stripped: Sequence[bytes] = (), *, is_unread: bool = False
    ) -> SizedRequest:
        """Classifies a decoded body of `size` bytes, and sizes its prompts by their bytes."""
        snapshot, endpoint, headers = self._snapshot, self._endpoint, self._headers
        policy, names, api, tenant = snapshot.policy, snapshot.names, endpoint.api, self.tenant
        assert tenant is not None
        if endpoint.size is not None:
            payload.prompt_tokens = endpoint.size.of(size)
        if payload.background:
            refuse_background(payload, policy.background)
        asked = Asked(endpoint, payload, headers, client_headers(tuple(headers)))
        if self.trace is not None:
            self.trace(asked, tenant)
        self.classification = classification = snapshot.classifier.classify(asked, tenant)
        if tenant.models is not None:
            names.refuse_others(tenant, payload.model, None if is_unread else payload.body)
        requests, cap = payload.prompts * payload.choices, None
        if requests > 1 or payload.unsized is not None:
            refuse_what_is_too_much(payload, policy)
        if tenant.limits.max_output_tokens is not None:
            cap = _output_cap(api, payload, tenant, policy.engine)
        prompt_tokens = snapshot.estimator.prompt_tokens(payload, tenant.name)
        output = payload.max_output_tokens
        if output is None:
            default = policy.tiers[classification.level].default_output_tokens
            output = default if cap is None else min(default, cap)
        stripped = (*stripped, *asked.stripped, *snapshot.credentials.stripped(headers))
        if self._unread_keys:
            classification = classification.ignoring(self._unread_keys)
            if not policy.forward_key:
                stripped = (*stripped, *(place.encode() for place in self._unread_keys))
        classification, objective, deadline_us = self._promised(classification)
        if tenant.users is not None:
            from sidecar.identity.users import find_user

            classification = replace(classification, user=find_user(tenant, headers, payload.body))
        self.classification = classification
        added = snapshot.credentials.added
        request = SizedRequest(  # with more than 15 names Python would make a dict of them
            headers,
            payload,
            classification,
            api,
            path=endpoint.path,
            prompt_tokens=prompt_tokens,
            tokens=tokens_to_hold(payload, prompt_tokens, output),
            assumed_output=output,
            requests=requests,
            stripped=stripped,
            added=(*added, NOT_PACKED) if NOT_PACKED[0] in headers else added,
            output_cap=cap,
            max_wait_s=_asked_wait_s(headers),
            objective=objective,
            is_unread=is_unread,
            engine_model=names.renamed.get(payload.model),
            deadline_us=deadline_us,
        )
        return request.with_charges(names) if names.have_charges else request

    def _promised(self, classification: Classification) -> tuple[Classification, Objective | None, int | None]:
        """The request's objective and deadline, as far as its client may change them; what did not count is noted."""
        snapshot, headers = self._snapshot, self._headers
        objective = snapshot.objectives[classification.level] if snapshot.objectives else None
        if objective is not None and not headers.keys().isdisjoint(SLO_HEADERS):
            objective, ignored = asked_slo(headers, objective)
            classification = classification.ignoring(ignored)
        deadline_us = asked_us = self._deadline_us
        if asked_us is not None:
            from sidecar.admission.deadline import latest_deadline_us

            deadline_us = latest_deadline_us(snapshot.policy, classification.level, asked_us, self._received_us)
            if deadline_us != asked_us:
                classification = classification.ignoring((DEADLINE_HEADER.decode(),))
            objective = None  # it waits for as long as it may: that is no miss of its tier's `slo`
        return classification, objective, deadline_us


async def counted(request: SizedRequest, snapshot: PolicySnapshot) -> SizedRequest:
    """The request with its prompts sized by the policy's tokenizer instead, where it names one."""
    counter = snapshot.estimator.counter
    if counter is None:
        return request
    prompt_tokens = await snapshot.estimator.counted_prompt_tokens(request.payload, counter)
    tokens = tokens_to_hold(request.payload, prompt_tokens, request.assumed_output)
    return replace(request, prompt_tokens=prompt_tokens, tokens=tokens)


def sized_for(
    pool: Pool, request: SizedRequest, sizes: LeaseSizes, meter: GainMeter | None, tier_names: Sequence[bytes]
) -> SizedRequest:
    """The request as it asks for room in a pool. `meter` is there where the pool orders by gain."""
    if request.requests > 1:
        request = replace(request, requests=request.list_size(pool))
    if request.payload.unsized is not None:  # unlimited tokens are not counted
        most = pool.most_tokens(request.classification.level)
        request = replace(request, tokens=max(request.tokens, most if most < UNLIMITED else 0))
    elif sizes.learns:
        request = request.expecting(sizes, pool)
    return request if meter is None else replace(request, gain=meter.appraise(request, tier_names))


def _asked_wait_s(headers: Mapping[bytes, bytes]) -> float | None:
    """The longest wait that the client allows, in seconds; None where it does not say. Raises InvalidHeader."""
    raw = headers.get(MAX_WAIT_HEADER)
    try:
        return None if raw is None else float(duration_s(raw.decode("latin-1").strip()))
    except ValueError as error:
        raise InvalidHeader(f"{MAX_WAIT_HEADER.decode()}: {error}") from None


# -- the checks


def is_upload(headers: Mapping[bytes, bytes]) -> bool:
    """True if the body of a request of the generic API is a form, sound or pictures: such a one is not read here."""
    return _UPLOADS.match(headers.get(b"content-type", b"").strip()) is not None


def refuse_two_keys(pairs: Headers, headers: Mapping[bytes, bytes], snapshot: PolicySnapshot) -> None:
    """Raises InvalidHeader where a header that holds a key is given twice: the engine might read the other one.

    The same for a header of the gateway: one of them might be the client's own.
    """
    if len(headers) == len(pairs):
        return
    for name in (*KEY_HEADERS, *snapshot.credentials.of_gateway):
        if sum(found == name for found, _ in pairs) > 1:
            what = "send one key, once" if name in KEY_HEADERS else "the gateway must replace what its client sent"
            raise InvalidHeader(f"{name.decode('latin-1')} is given twice; {what}")


def _refuse_two_values(pairs: Headers, names: Sequence[bytes]) -> None:
    """Raises InvalidHeader for a header with two different values: none of them may be dropped in silence."""
    for name in names:
        if len({value for found, value in pairs if found == name}) > 1:
            raise InvalidHeader(f"{name.decode('latin-1')} is given twice, with different values; send it once")


def _declared_length(pairs: Headers, headers: Mapping[bytes, bytes]) -> int:
    """The Content-Length in bytes. Raises InvalidHeader where it contradicts itself."""
    given = headers[b"content-length"]
    is_ambiguous = len(headers) != len(pairs) and len({value for name, value in pairs if name == b"content-length"}) > 1
    if is_ambiguous or not given.isdigit() or len(given) > _LONGEST_LENGTH:
        raise InvalidHeader("content-length is given twice, or is no number of bytes; send it once")
    if b"transfer-encoding" in headers:  # a server after this one might believe the other header
        raise InvalidHeader("content-length and transfer-encoding exclude each other; send one of them")
    return int(given)


def _refuse_other_text(body: bytes) -> None:
    """Raises InvalidBody: text that `payload.decode` skips is not decoded there, and would fail at the engine."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidBody(f"the body is not UTF-8 (byte {error.start}); send JSON in UTF-8") from None


def refuse_background(payload: Payload, choice: Background) -> None:
    """Raises BackgroundNotAllowed where the policy refuses it, and InvalidBody for one that could not be followed."""
    if choice is Background.REFUSE:
        raise BackgroundNotAllowed(
            "background: true is not allowed here, because such a response runs on after its request is answered; "
            "leave it out, and send stream: true for a long answer (the policy's `background: hold` would allow it)",
            param="background",
        )
    if payload.names_response:
        raise InvalidBody(
            "request_id: leave it out of a background request, which is followed by the id that the engine gives it",
            param="request_id",
        )


def refuse_what_is_too_much(payload: Payload, policy: Policy) -> None:
    """Raises TooManyChoices or UnsizedPrompt for a request that the policy allows no one."""
    if payload.choices > policy.max_choices:
        raise TooManyChoices(
            f"this request asks for {payload.choices} choices of a prompt; {policy.max_choices} are allowed; ask for a "
            "smaller n or best_of"
        )
    if payload.unsized is not None and policy.unsized is Unsized.REFUSE:
        raise UnsizedPrompt(
            f"{payload.unsized}: the size of the prompt that it stands for is not known here; send that prompt itself, "
            "or ask the operator for `unsized: hold`",
            param=payload.unsized,
        )


def _output_cap(api: Api, payload: Payload, tenant: Tenant, engine: type[Engine]) -> int | None:
    """The tenant's `max_output_tokens`, where the body must be given it; else None. Raises OutputTooLong.

    A maximum of 0 counts as no maximum, but for text completions: engines treat it as absent.
    """
    most = tenant.limits.max_output_tokens
    if most is None or api not in MAXIMUM_FIELDS:
        return None
    asked = payload.max_output_tokens or 0
    if asked > most:
        raise OutputTooLong(
            f"{MAXIMUM_FIELDS[api][-1]}: {asked} is more than the {most} tokens that one answer to tenant "
            f"{tenant.name} may have; send {most} or less",
            param=MAXIMUM_FIELDS[api][-1],
        )
    default, body = engine.default_completion_tokens, payload.body
    if api is Api.COMPLETIONS and default is not None and most >= default and remove(body, ("max_tokens",)) is body:
        return None  # a cap above the engine's default would make the answer longer
    is_unbounded = payload.max_output_tokens is None or (asked == 0 and api is not Api.COMPLETIONS)
    return most if is_unbounded else None


# -- how the pool recognizes a request


def _attempt(headers: Mapping[bytes, bytes]) -> int | None:
    raw = headers.get(ATTEMPT_HEADER, b"")
    return int(raw) if len(raw) <= _LONGEST_LENGTH and raw.isdigit() else None
