"""The names that our spans use, and the labels of metrics: ours, and those copied from OpenTelemetry's conventions.

A metric's name is in its declaration (`sidecar.figures`).

The GenAI names are copied from https://github.com/open-telemetry/semantic-conventions-genai (status Development, as
published with opentelemetry-semantic-conventions 0.66b2, schema 1.44.0); they moved there in May 2026 and are marked
deprecated where Python's `_incubating` module still has them, so that module is never imported. The HTTP, URL and error
names are stable since semantic conventions 1.23.
"""

from __future__ import annotations

from typing import Final

SCOPE: Final = "sidecar"
"""The instrumentation scope of all that is ours."""

# Spans, and their events.
ADMISSION: Final = "admission"
QUEUED: Final = "admission.queued"
STARVED: Final = "admission.starved"
WAITING: Final = "admission.waiting"
ENGINE: Final = "engine"
FIRST_BYTE: Final = "first_byte"
REPLAYED: Final = "replayed"
PREEMPTED: Final = "preempted"

# Ours. Names end in their unit; token figures count tokens.
ADMISSION_REQUEST_ID: Final = "admission.request_id"
ADMISSION_TIER: Final = "admission.tier"
ADMISSION_TENANT: Final = "admission.tenant"
ADMISSION_KEY: Final = "admission.key"
ADMISSION_SOURCE: Final = "admission.source"
ADMISSION_CLAMPED_FROM: Final = "admission.clamped_from"
ADMISSION_DOWNGRADED_FROM: Final = "admission.downgraded_from"
ADMISSION_RISEN_FROM: Final = "admission.risen_from"
ADMISSION_DECISION: Final = "admission.decision"
ADMISSION_REASON: Final = "admission.reason"
ADMISSION_OBSTACLE: Final = "admission.obstacle"
ADMISSION_EXPLANATION: Final = "admission.explanation"
ADMISSION_OUTCOME: Final = "admission.outcome"
ADMISSION_QUEUE_WAIT_S: Final = "admission.queue_wait_s"
ADMISSION_STARVATION_S: Final = "admission.starvation_s"
ADMISSION_IS_WAITING: Final = "admission.is_waiting"
ADMISSION_REQUESTS_BEFORE: Final = "admission.requests_before"
ADMISSION_STARVED_TOO_LONG: Final = "admission.starved_too_long"
ADMISSION_SERVED_AHEAD_PREFIX: Final = "admission.served_ahead."
ADMISSION_OVERTAKEN_BY_PREFIX: Final = "admission.overtaken_by."
# Of each tier that overtook. The tier is last: backends cut long names, and some nest names at their dots.
ADMISSION_AHEAD_REQUESTS_PREFIX: Final = "admission.ahead.requests."
ADMISSION_AHEAD_TOKENS_PREFIX: Final = "admission.ahead.tokens."
ADMISSION_AHEAD_TENANTS_PREFIX: Final = "admission.ahead.tenants."
ADMISSION_AHEAD_BECAUSE_PREFIX: Final = "admission.ahead.because."
ADMISSION_AHEAD_RULES_PREFIX: Final = "admission.ahead.rules."
ADMISSION_PASSED_PREFIX: Final = "admission.passed."
ADMISSION_RULE: Final = "admission.rule"
ADMISSION_TOKENS_RESERVED: Final = "admission.tokens.reserved"
ADMISSION_TOKENS_USED: Final = "admission.tokens.used"
ADMISSION_TOKENS_MOST: Final = "admission.tokens.most"
ADMISSION_TOKENS_HELD: Final = "admission.tokens.held"
ADMISSION_OUTPUT_EXPECTED: Final = "admission.output.expected"
ADMISSION_OUTPUT_SOURCE: Final = "admission.output.source"
ADMISSION_OUTPUT_QUANTILE: Final = "admission.output.quantile"
ADMISSION_OVERLAP: Final = "admission.overlap"
ADMISSION_GROWTHS: Final = "admission.growths"
ADMISSION_LEVEL: Final = "admission.level"
ADMISSION_SLO: Final = "admission.slo"
ADMISSION_ENGINE_PRIORITY: Final = "admission.engine_priority"
OBSERVED_DECISION: Final = "admission.observed.decision"
OBSERVED_REASON: Final = "admission.observed.reason"
OBSERVED_QUEUE_WAIT_S: Final = "admission.observed.queue_wait_s"
OBSERVED_STARVATION_S: Final = "admission.observed.starvation_s"
ADMISSION_ENGINE: Final = "admission.engine"
ADMISSION_ENGINE_HIT: Final = "admission.engine.predicted_hit"
ADMISSION_ENGINE_CLAIMED_S: Final = "admission.engine.claimed_s"
ADMISSION_SERVED_BY: Final = "admission.served_by"
ADMISSION_REPLAYS: Final = "admission.replays"
ADMISSION_REPLAY_REASON: Final = "admission.replay.reason"
ADMISSION_PREEMPTED: Final = "admission.preempted"
ADMISSION_PREEMPTIONS: Final = "admission.preemptions"

# Labels of metrics, beside those above that spans have, too.
POOL: Final = "admission.pool"
STORE_STATE: Final = "admission.store.state"
BY: Final = "admission.by"
OUTPUT_RATIO: Final = "admission.output.ratio"
DIRECTION: Final = "admission.direction"
GENERATION: Final = "admission.policy.generation"
ADMISSION_ROUTE: Final = "admission.route"
ENGINE_STATE: Final = "admission.engine.state"

# Service gain: attributes of spans, and metrics.
GAIN_EARNED: Final = "admission.gain.earned"
GAIN_ATTAINABLE: Final = "admission.gain.attainable"

# OpenTelemetry's, GenAI.
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
# Not in the conventions; vLLM and SGLang emit it, in seconds, and dashboards built for them look for it.
GEN_AI_LATENCY_TIME_IN_QUEUE: Final = "gen_ai.latency.time_in_queue"

# OpenTelemetry's, HTTP and errors.
HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
ERROR_TYPE: Final = "error.type"

# The conventions' operation for each of our request shapes; they say `chat` for OpenAI's responses and Anthropic's
# messages alike.
OPERATIONS: Final = {
    "chat": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "messages": "chat",
    "embeddings": "embeddings",
}
