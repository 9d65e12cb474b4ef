"""Token usage of a response, read as it passes: the engine's `usage`, or the number of a stream's chunks.

OpenAI's engines send `usage` last (and null before it, in a stream that was asked for it). Anthropic's API sends the
input's usage in the first event and the output's in the last. It counts the part of the prompt that was read from the
cache, and the part that went into it, apart from `input_tokens`: here all three are the prompt. Both are found by the
member's name in the bytes that pass, wherever it is nested, and the body is not kept. Generated text cannot be mistaken
for it: there the name's quotes are escaped. A tool or a schema that the client wrote can, where the answer repeats it:
so a count never falls, and a stream of the responses API, which begins with the request, has none before its last
event.

An event counts as one token until the tenant's answers have shown how many it has. One that is larger than any event of
one token counts by its bytes, too: an engine whose client reads slowly puts what it generates meanwhile into one event.
Where no one asks for the usage of streams, their text is measured: its bytes say more than the number of its events.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated

import msgspec

from sidecar.lengths.histogram import OutputRatio, OutputRatios
from sidecar.policy.cost import TokenCost

_EVENT = b"data:"
_NAME = b'"usage"'
_BRACE = ord("{")
_CUT_NAME = len(_NAME) - 1
_FLAT = rb"\{[^{}]*\}"
_NESTED = rb"\{[^{}]*(?:" + _FLAT + rb"[^{}]*)*\}"
_OBJECT = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:' + _NESTED + rb"[^{}]*)*\})")
"""With details, which may have details of their own."""
READ_BYTES = 4096
"""Bytes of a response that are read together, ten to fifty events: to read one event costs as much as to read ten."""
LONGEST = 4096
"""Bytes of an unfinished `usage` object that are kept; real ones have a few hundred."""
LARGEST_EVENT = 768
"""Bytes of an event that may still be of one token, where it has no log probabilities: most have 200 to 400."""
_FRAME = 256
"""Bytes of an event beside its text."""
_BYTES_PER_TOKEN = 4
"""Of text in JSON: English has 4 to 5."""
_LOG_PROBABILITY, _OTHER_TOKENS, _OF_TOKENS = b'"logprob":', b'"top_logprobs":', b'"token_logprobs":'
_REPEATS = re.compile(
    rb'(?<!\\)"response\.[a-z_.]*(?:created|queued|in_progress|added|done|completed|incomplete|failed)"'
)
"""The type of an event of `/v1/responses` that holds the request, or what was generated before, once more."""
_TEXTS = (b'content":"', b'text":"', b'reasoning":"', b'arguments":"')
"""Before the generated text of chat and text completions, also in `reasoning_content`."""
_LONGEST_TEXT = 64 * 1024
"""Bytes of a line, which has an event or a whole answer, whose text is measured."""
_AFTER_COUNT = 4
"""Events that may follow an engine's last count: the end of the message, `[DONE]`."""

_MOST_TOKENS = 2**40
"""No answer has so many: a larger count says nothing, and a negative one neither."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)] | None
_BEGINS = b"response.created"
_REQUEST = re.compile(rb"event: ?response\.created\r?\n")
_END = re.compile(rb"event: ?response\.(?:completed|incomplete|failed)\r?\n")
"""Of `/v1/responses`. Generated text has no such line: a line break is escaped there."""


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count = None


class _Usage(msgspec.Struct, gc=False):
    """A `usage` as engines write it."""

    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    input_tokens: _Count = None
    output_tokens: _Count = None
    total_tokens: _Count = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count = None
    cache_creation_input_tokens: _Count = None


class _Answer(msgspec.Struct, gc=False):
    usage: _Usage | None = None


# Some engines write a count as a float or in a string.
_decode_answer = msgspec.json.Decoder(_Answer, strict=False).decode
_decode = msgspec.json.Decoder(_Usage, strict=False).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class UsageReader(msgspec.Struct, eq=False):
    """The usage of one response as of the last `read`. `feed` keeps its bytes, and reads them `READ_BYTES` at a time.

    Call `read` once more at the response's end. An answer in one piece is read at once: so many `_tried` bytes of the
    beginning are no such answer. `has_begun` is the caller's note that there is an answer. `chunks`
    counts the events of a stream: about one generated token each, and `large_tokens` more for large ones.
    `input_tokens` are the whole prompt, `cached_tokens` those of them that the engine's prefix cache had: None where no
    answer said it. Engines that say it leave it out where it is 0. `read_bytes` are those of a stream's body,
    `text_bytes` those of the generated text, None where it is not measured, `later_tokens` those that came after the
    engine's last count: see `conclude`.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    chunks: int = 0
    large_tokens: int = 0
    has_begun: bool = False
    read_bytes: int = 0
    text_bytes: int | None = None
    later_tokens: int | None = None
    _line: bytes = b""
    _reads: int = 0
    _counted_at: int = 0
    _is_unended: bool = False
    _carried: bytes = b""
    _unread: bytearray | None = None
    _tried: int = 0

    def feed(self, body: bytes | memoryview) -> bool:
        """Takes the next bytes of the response, as they were sent. Returns whether they were read."""
        unread = self._unread
        if unread is None:
            if self._take_whole(body):  # so are most answers that do not stream
                return True
            self._unread = unread = bytearray()
            self._tried = len(body)
        unread += body
        if len(unread) < READ_BYTES:
            return False
        self.read()
        return True

    @property
    def passed(self) -> tuple[int, int]:
        """Another value whenever more of the response was fed."""
        return self._reads, len(self._unread or b"")

    def read(self) -> None:
        """Counts the events that were fed since the last time, and takes the usage among them."""
        unread, seen, since = self._unread, self.chunks, 0
        if not unread:
            return
        self._reads += 1
        body = bytes(unread)
        unread.clear()
        self.read_bytes += len(body)
        if not seen and not self._carried and len(body) > self._tried and self._take_whole(body):
            return
        if self.text_bytes is not None:
            self._measure(self._line + body)
        window = self._carried + body
        if seen or body[:1] != b"{":  # a whole answer has no events
            self._count_events(body)
            since = self._request_ends(window, is_first=not seen)
        at = window.find(_NAME)
        if at >= 0:
            at = self._take_all(window, at, since)
        # Kept for the next time: an object that is not complete, or what may be the beginning of its name.
        self._carried = window[at:] if at >= 0 and len(window) - at < LONGEST else window[-_CUT_NAME:]

    def _take_whole(self, body: bytes | memoryview) -> bool:
        """Takes the usage of an answer that came in one piece. False where the body is none, or says nothing."""
        try:
            usage = _decode_answer(body).usage if body and body[0] == _BRACE else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        if usage is None:
            return False
        if self.text_bytes == 0:
            self.text_bytes = _text_bytes(bytes(body))
        self._count(usage)
        return True

    def conclude(self, ratios: OutputRatios, tenant: str, model: str | None) -> None:
        """Reads the rest. Estimates what the engine has not counted by the tenant's other answers, or teaches."""
        if self._unread:  # most answers that do not stream were read at once
            self.read()
        if self._line:
            self._measure(self._line + b"\n")
        if not self.chunks and not self.text_bytes:
            return
        ratio, output, text_bytes = ratios.of(tenant, model), self.output_tokens, self.text_bytes
        if output is None:
            events = self.chunks - self.large_tokens
            self.later_tokens = ratio.tokens(events, text_bytes) if text_bytes else self._later(self.chunks, ratio)
        elif self.later_chunks:
            self.later_tokens = self._later(self.later_chunks, ratio)
        elif output:
            ratio.learn(output, self.chunks - self.large_tokens, text_bytes)

    def _later(self, chunks: int, ratio: OutputRatio) -> int:
        return max(chunks, ratio.tokens(max(0, chunks - self.large_tokens), None))

    def _measure(self, window: bytes) -> None:
        """Measures the text in the lines that are complete."""
        end = window.rfind(b"\n") + 1
        self._line = window[end:]
        self.text_bytes = (self.text_bytes or 0) + _text_bytes(window[:end])
        if len(self._line) > _LONGEST_TEXT:
            self.text_bytes, self._line = None, b""

    def _count_events(self, body: bytes) -> None:
        seen = self.chunks
        self.chunks = seen + body.count(_EVENT)
        if self.chunks and _has_large_event(body):
            events = body.split(_EVENT)
            self._count_large(events if seen else events[2:])  # the first event may repeat the prompt

    def _take_all(self, window: bytes, at: int, since: int) -> int:
        """Takes every usage object from `since` on. The first name is at `at`. Returns that of a cut object, or -1."""
        while at >= 0:
            found = _OBJECT.match(window, at)
            following = window.find(_NAME, at + 1 if found is None else found.end())
            if found is None and following < 0:
                return at
            if found is not None and at >= since:
                self._take(found.group(1), window.count(_EVENT, found.end()) if self.chunks else 0)
            at = following
        return -1

    def _request_ends(self, window: bytes, *, is_first: bool) -> int:
        """The place from which a usage counts.

        A stream of the responses API repeats the request until its last event.
        """
        if is_first and self.chunks and _BEGINS in window and _REQUEST.search(window):
            self._is_unended = True
        if not self._is_unended:
            return 0
        end = _END.search(window)
        if end is None:
            return len(window)
        self._is_unended = False
        return end.start()

    def counted(self, input_tokens: int | None, output_tokens: int | None) -> None:
        """Takes the engine's count; None is not said. What no answer has is not taken."""
        self._count(_Usage(input_tokens=_possible(input_tokens), output_tokens=_possible(output_tokens)))

    def _count(self, usage: _Usage, later: int = 0) -> None:
        """Takes a count that `later` chunks came after."""
        seen_input, seen_output = usage.prompt_tokens, usage.completion_tokens
        if seen_input is None:
            seen_input = _named_prompt(usage)
        if seen_output is None:
            seen_output = usage.output_tokens
        if seen_input is None and seen_output is None:
            seen_input = usage.total_tokens  # all that some engines say of embeddings
        if seen_input is not None and seen_input >= (self.input_tokens or 0):
            self.input_tokens, self.cached_tokens = seen_input, _cached(usage)
        if seen_output is not None:
            if self.output_tokens is None or seen_output > self.output_tokens:
                self.output_tokens = seen_output
            if self.chunks:
                self._counted_at = self.chunks - later

    @property
    def later_chunks(self) -> int:
        """`chunks` since the engine counted its output: 0 where that is the last that it says.

        Some APIs send a count with the first event, and others with each. An answer that breaks off has no last one.
        """
        later = self.chunks - self._counted_at
        return later if later > _AFTER_COUNT else 0

    def prompt_part(self, tokens: int, prompt_tokens: int) -> int:
        """The part of so many tokens that was the prompt: the engine's own count, or the estimate `prompt_tokens`."""
        return min(tokens, prompt_tokens if self.input_tokens is None else self.input_tokens)

    def used_tokens(self, prompt_tokens: int) -> int:
        """The engine's own count, and what came since; without one the prompt's estimate and all that came."""
        used = prompt_tokens if self.input_tokens is None else self.input_tokens
        used += self.output_tokens or 0
        if not self.chunks and self.later_tokens is None:
            return used
        if self.later_tokens is None:
            return used + (self.chunks if self.output_tokens is None else self.later_chunks)
        return used + self.later_tokens

    def is_known(self, status: int | None) -> bool:
        """True if the response, or its failure, says how many tokens were used."""
        is_counted = self.output_tokens is not None or self.input_tokens is not None or self.chunks > 0
        return is_counted or (status is not None and status >= 400)

    def _take(self, raw: bytes, later: int) -> None:
        try:
            usage = _decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            usage = _read_apart(raw)
        self._count(usage, later)

    def _count_large(self, events: list[bytes]) -> None:
        more = 0
        for event in events:
            if len(event) <= LARGEST_EVENT:
                continue
            counted = _counted_by_log_probabilities(event)
            tokens = (len(event) - _FRAME) // _BYTES_PER_TOKEN if counted is None else counted - 1
            if tokens and not _REPEATS.search(event[:_FRAME] + event[-_FRAME:]):
                more += tokens
        self.large_tokens += more
        self.chunks += more


def weighed(cost: TokenCost, usage: UsageReader, prompt_tokens: int, tokens: int) -> int:
    """The count for `tokens` of an answer's usage. `prompt_tokens` is the estimate of its prompts."""
    prompt = usage.prompt_part(tokens, prompt_tokens)
    return cost.of(prompt, usage.cached_tokens or 0, tokens - prompt)


def _has_large_event(body: bytes) -> bool:
    """True if an event is larger than LARGEST_EVENT: from one event to the last that begins so soon after it."""
    at, longest = 0, LARGEST_EVENT + len(_EVENT)
    while len(body) - at > longest:
        at = body.rfind(_EVENT, at + 1, at + longest + len(_EVENT))
        if at < 0:
            return True
    return False


def _counted_by_log_probabilities(event: bytes) -> int | None:
    """The tokens of an event with log probabilities, which may be 2 KiB for one; None where it has none."""
    if _LOG_PROBABILITY in event:  # a chat's: an object with a list of the others for each token
        return max(1, event.count(_OTHER_TOKENS))
    begin = event.find(_OF_TOKENS)  # a text completion's: a list of numbers
    return None if begin < 0 else event.count(b",", begin, event.find(b"]", begin)) + 1


def _text_bytes(body: bytes) -> int:
    """Bytes of the strings that have the generated text, as they are written."""
    plain = body.replace(b'": "', b'":"')
    if b"\\" in plain:
        plain = plain.replace(b"\\\\", b"??").replace(b'\\"', b"??")
    parts = [part for name in _TEXTS if name in plain for part in plain.split(name)[1:]]
    return sum([part.find(b'"') for part in parts])


def _read_apart(raw: bytes) -> _Usage:
    """An engine's own form of usage: a member of another kind hides no other."""
    usage = _Usage()
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        members = _decode_members(raw)
        for name in members.keys() & _Usage.__struct_fields__:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                member = _decode(b'{"%b":%b}' % (name.encode(), bytes(members[name])))
                setattr(usage, name, getattr(member, name))
    return usage


def _possible(count: int | None) -> int | None:
    return count if count is not None and 0 <= count <= _MOST_TOKENS else None


def _cached(usage: _Usage) -> int | None:
    """The part of its prompt that the cache had. What another usage says of it is of another prompt."""
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return usage.cache_read_input_tokens if details is None else details.cached_tokens


def _named_prompt(usage: _Usage) -> int | None:
    """The whole prompt in `input_tokens`. Only Anthropic's API counts the cached parts apart."""
    prompt = usage.input_tokens
    if prompt is None or usage.input_tokens_details is not None:
        return prompt
    return prompt + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
