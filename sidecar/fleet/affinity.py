"""Affinity: how many tokens of a request's prompt each engine is predicted to have cached.

Two predictions exist, and the larger one counts for each engine.

- **Prefix** (`prefix_table`): the prompt's own bytes, found in what each engine was sent.
- **Session**: the engine that last served the session holds what it then had, the prompt and the answer. The prefix
  tables do not know an answer's text before the next prompt has it.

A session is named by the client, in a header or as `prompt_cache_key`, and belongs to one tenant: another tenant that
uses the same name has another session. A tenant that names sessions by the million pushes out its own. A name that
does not stand for one conversation shows by what the engine found: then only that much is predicted the next time.

Nothing here does I/O or reads a clock. One `AffinityPredictor` serves one pool in one process; it is not thread-safe.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sidecar.apis import Api
from sidecar.fleet.prefix_table import BLOCK_BYTES, MOST_BLOCKS, MOST_HITS, Chain, PrefixTable, PrefixTables, Sent
from sidecar.payload.prompt_bytes import NO_PROMPT, PromptBytes, prompt_bytes, short_name

PROMPT_CACHE_KEY = b"prompt_cache_key"
"""The source of a session's name that is a member of the body. Every other source is a header, in lower case."""
MOST_SESSIONS = 2**16
"""Sessions of a process: at most 30 MB."""
_AT_ONCE = 16
"""The share of its sessions that the tenant with the most loses at once, so that to look for it is rare."""


class Session(NamedTuple):
    """Tokens that a session's engine had after its last answer: `all_tokens`, of which the next prompt should find
    `tokens`.

    `entered_tokens` dates it: see `PrefixTable`.
    """

    engine_id: str
    tokens: int
    all_tokens: int
    entered_tokens: int


class Sessions:
    """The last engine of each session: at most `most`, the least recently used of the tenant with the most go first.

    A session's name is kept as a hash, so its length costs no memory.
    """

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._count = 0
        self._of: dict[str, OrderedDict[int, Session]] = {}

    def __len__(self) -> int:
        return self._count

    def get(self, tenant: str, name: int) -> Session | None:
        """A tenant's session, None for an unknown one."""
        sessions = self._of.get(tenant)
        return None if sessions is None else sessions.get(name)

    def set(self, tenant: str, name: int, session: Session) -> None:
        """Notes a tenant's session as the most recently used one."""
        sessions = self._of.get(tenant)
        if sessions is None:
            sessions = self._of[tenant] = OrderedDict()
        self._count += name not in sessions
        sessions[name] = session
        sessions.move_to_end(name)
        if self._count > self._most:
            self._make_room(tenant)

    def _make_room(self, tenant: str) -> None:
        """Drops the oldest of the newcomer's own tenant where it has more than its share, else of the largest."""
        own = self._of[tenant]
        if len(own) > self._most // len(self._of):
            own.popitem(last=False)
            self._count -= 1
            return
        largest = max(self._of, key=lambda name: len(self._of[name]))
        for _ in range(-(-len(self._of[largest]) // _AT_ONCE)):
            self._of[largest].popitem(last=False)
            self._count -= 1
        if not self._of[largest]:
            del self._of[largest]


class Prediction:
    """Prediction for one request, with what is needed to learn from its answer.

    `hits` are at most 8 pairs of an engine's id and the tokens that it has, the best first.
    """

    __slots__ = ("_chain", "_engine_id", "_is_comparable", "_name", "_sent", "_session", "api", "hits", "tenant")

    def __init__(self, tenant: str, api: Api, chain: Chain, name: int | None, *, is_comparable: bool) -> None:
        self.tenant = tenant
        self.api = api
        self.hits: tuple[tuple[str, int], ...] = ()
        self._chain = chain
        self._name = name
        self._is_comparable = is_comparable
        self._engine_id: str | None = None
        self._sent: Sent | None = None
        self._session: Session | None = None

    def tokens_at(self, engine_id: str) -> int:
        """The tokens that one engine is predicted to have."""
        return next((tokens for name, tokens in self.hits if name == engine_id), 0)


NOTHING = Prediction("", Api.CHAT, Chain(NO_PROMPT, 0), None, is_comparable=False)
"""The prediction of every request that has no full block and no session. Nothing is learned from it."""


class AffinityPredictor:
    """The predictions of one pool. `prefix` and `session` are the policy's `affinity.prefix` and `affinity.session`."""

    def __init__(
        self,
        *,
        prefix: bool = True,
        session: Sequence[bytes] = (),
        most_blocks: int = MOST_BLOCKS,
        most_sessions: int = MOST_SESSIONS,
    ) -> None:
        self.tables = PrefixTables(most_blocks)
        self.sessions = Sessions(most_sessions)
        self._prefix = prefix
        self._sources = tuple(session)
        self._names_in_body = PROMPT_CACHE_KEY in self._sources
        self._reads_body = prefix or self._names_in_body

    def set_engines(self, kv_tokens: Mapping[str, int]) -> None:
        """Sets the engines of the pool by id, and the tokens of each engine's KV cache."""
        self.tables.set_engines(kv_tokens)

    def predict(
        self, tenant: str, api: Api, body: bytes, headers: Mapping[bytes, bytes], prompt_tokens: int
    ) -> Prediction:
        """Predicts what each engine has of a request. `prompt_tokens` is the estimate of its prompt."""
        # A short body has no full block, unless it has a medium: these stand for more than their own bytes.
        is_read = self._reads_body and (len(body) >= BLOCK_BYTES or self._names_in_body or b'"type"' in body)
        prompt = prompt_bytes(api, body) if is_read else NO_PROMPT
        name = self._session_name(headers, prompt) if self._sources else None
        if name is None and (len(prompt.data) < BLOCK_BYTES or not self._prefix):
            return NOTHING
        chain = Chain(prompt if self._prefix else NO_PROMPT, prompt_tokens)
        prediction = Prediction(tenant, api, chain, name, is_comparable=prompt.is_single)
        prediction.hits = self.tables.hits(chain)
        if name is not None:
            self._add_session(prediction, name, prompt_tokens)
        return prediction

    def sent(self, prediction: Prediction, engine_id: str) -> None:
        """The request goes to an engine. Again where it is sent once more, to that engine or another."""
        if prediction is NOTHING:
            return
        prediction._engine_id, prediction._sent = engine_id, None
        table = self.tables.get(engine_id)
        if table is not None:
            prediction._sent = table.send(prediction._chain)

    def ended(
        self,
        prediction: Prediction,
        *,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int = 0,
    ) -> None:
        """The answer is complete, or broken off. The counts are the engine's own; None where it reports none."""
        engine_id = prediction._engine_id
        table = None if engine_id is None else self.tables.get(engine_id)
        if engine_id is None or table is None:
            return  # never sent, or its engine is gone
        table.end(prediction._chain, output_tokens)
        cached = None if prompt_tokens is None else self._count_cached(table, prediction.api, cached_tokens)
        if prompt_tokens and cached is not None and prediction._sent is not None and prediction._is_comparable:
            table.learn(prediction._chain, prediction._sent, prompt_tokens, min(cached, prompt_tokens))
        if prediction._name is not None:
            asked = prediction._chain.tokens if prompt_tokens is None else prompt_tokens
            total = asked + output_tokens
            had = self._had_of_session(prediction, asked, cached)
            session = Session(engine_id, total if had is None else had, total, table.entered_tokens)
            self.sessions.set(prediction.tenant, prediction._name, session)

    def _session_name(self, headers: Mapping[bytes, bytes], prompt: PromptBytes) -> int | None:
        """The session's name as a hash, by the first source that has one."""
        for source in self._sources:
            if source == PROMPT_CACHE_KEY:
                value = prompt.cache_key
            else:
                raw = headers.get(source)
                value = None if raw is None else short_name(raw.decode("latin-1"))
            if value is not None:
                return hash((source, value))
        return None

    def _add_session(self, prediction: Prediction, name: int, prompt_tokens: int) -> None:
        session = self.sessions.get(prediction.tenant, name)
        table = None if session is None else self.tables.get(session.engine_id)
        if session is None or table is None:
            return
        if self._prefix and table.entered_tokens - session.entered_tokens >= table.size_tokens:
            return  # as much as the engine can hold has come since then: none of the session is left
        prediction._session = session
        tokens = min(session.tokens, prompt_tokens)
        if tokens <= prediction.tokens_at(session.engine_id):
            return
        hits = [hit for hit in prediction.hits if hit[0] != session.engine_id]
        insort(hits, (session.engine_id, tokens), key=lambda hit: -hit[1])
        prediction.hits = tuple(hits[:MOST_HITS])

    @staticmethod
    def _count_cached(table: PrefixTable, api: Api, cached_tokens: int | None) -> int | None:
        """The engine's count. Engines that report one leave it out where it is 0 (vLLM, SGLang)."""
        if api in table.reporting:
            return cached_tokens or 0
        if cached_tokens is not None:
            table.reporting += (api,)
        return cached_tokens

    @staticmethod
    def _had_of_session(prediction: Prediction, prompt_tokens: int, cached: int | None) -> int | None:
        """The engine's count, where that is less than half of what it had of the session; None otherwise.

        The session's name then stands for no conversation.
        """
        session = prediction._session
        if session is None or session.engine_id != prediction._engine_id or cached is None:
            return None
        return cached if cached * 2 < min(session.all_tokens, prompt_tokens) else None
