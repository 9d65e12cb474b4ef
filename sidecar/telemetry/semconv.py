"""Every name that our spans and metrics use, in one place: ours, and those copied from OpenTelemetry's conventions.

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
ADMISSION_SOURCE: Final = "admission.source"
ADMISSION_CLAMPED_FROM: Final = "admission.clamped_from"
ADMISSION_DOWNGRADED_FROM: Final = "admission.downgraded_from"
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

# Metrics of requests.
QUEUE_WAIT: Final = "admission.queue_wait"
STARVATION: Final = "admission.starvation"
TIME_TO_FIRST_TOKEN: Final = "admission.time_to_first_token"
ADMITTED: Final = "admission.admitted"
REFUSED: Final = "admission.refused"
ABANDONED: Final = "admission.abandoned"
SETTLED: Final = "admission.settled"
FAILED: Final = "admission.failed"
PREEMPTIONS: Final = "admission.preemptions"
PREEMPTED_ENGINE_TIME: Final = "admission.preempted.engine_time"
CLAMPED: Final = "admission.clamped"
DOWNGRADED: Final = "admission.downgraded"
OVERTAKEN: Final = "admission.overtaken"
OVERTAKEN_TOKENS: Final = "admission.overtaken.tokens"
TOKENS_ESTIMATED: Final = "admission.tokens.estimated"
TOKENS_USED: Final = "admission.tokens.used"
TOKENS_ESTIMATE_ERROR: Final = "admission.tokens.estimate_error"
OUTPUT_ANSWERS: Final = "admission.output.answers"
LEASE_GROWTHS: Final = "admission.lease.growths"
UNGUARDED: Final = "admission.unguarded"
OBSERVED: Final = "admission.observed"
OBSERVED_QUEUE_WAIT: Final = "admission.observed.queue_wait"
OBSERVED_STARVATION: Final = "admission.observed.starvation"
TENANT_ADMITTED: Final = "admission.tenant.admitted"
TENANT_REFUSED: Final = "admission.tenant.refused"
TENANT_TOKENS_USED: Final = "admission.tenant.tokens_used"
TENANT_TOKENS_HELD: Final = "admission.tenant.tokens_held"

# Metrics of a pool as it stands.
QUEUE_REQUESTS: Final = "admission.queue.requests"
QUEUE_TOKENS: Final = "admission.queue.tokens"
QUEUE_OLDEST_WAIT: Final = "admission.queue.oldest_wait"
QUEUE_LONGEST_STARVATION: Final = "admission.queue.longest_starvation"
HELD_TOKENS: Final = "admission.held.tokens"
HELD_REQUESTS: Final = "admission.held.requests"
RESERVE_TOKENS: Final = "admission.reserve.tokens"
RESERVE_REQUESTS: Final = "admission.reserve.requests"
LIMIT_TOKENS: Final = "admission.limit.tokens"
LIMIT_REQUESTS: Final = "admission.limit.requests"
BORROWED_TOKENS: Final = "admission.borrowed.tokens"
LENT_TOKENS: Final = "admission.lent.tokens"
CAPACITY_TOKENS: Final = "admission.capacity.tokens"
CAPACITY_REQUESTS: Final = "admission.capacity.requests"
SLO_TTFT: Final = "admission.slo.ttft"
SLO_QUEUE_WAIT: Final = "admission.slo.queue_wait"
SLO_STARVATION: Final = "admission.slo.starvation"
POLICY_INFO: Final = "admission.policy.info"
POLICY_REJECTED: Final = "admission.policy.rejected"
ABORTING_REQUESTS: Final = "admission.aborting.requests"
ABORTING_TOKENS: Final = "admission.aborting.tokens"
REPLICAS: Final = "admission.replicas"
GENERATIONS: Final = "admission.policy.generations"
PASSING: Final = "admission.passing"
ENGINE_UP: Final = "admission.engine.up"
LOOP_BLOCKED: Final = "admission.event_loop.blocked"

# Metrics of a pool of several engines; the gauge of their states is called as its label, `ENGINE_STATE`.
ENGINE_CAPACITY_TOKENS: Final = "admission.engine.capacity.tokens"
ENGINE_CAPACITY_REQUESTS: Final = "admission.engine.capacity.requests"
ENGINE_HELD_TOKENS: Final = "admission.engine.held.tokens"
ENGINE_HELD_REQUESTS: Final = "admission.engine.held.requests"
ENGINE_UNPREFILLED: Final = "admission.engine.unprefilled.tokens"
ENGINE_CLAIMS: Final = "admission.engine.claims"
ENGINE_IN_FLIGHT: Final = "admission.engine.in_flight"
ENGINE_EJECTIONS: Final = "admission.engine.ejections"
REPLAYS: Final = "admission.replays"
PROMPT_TOKENS: Final = "admission.prompt.tokens"
PREFIX_PREDICTED: Final = "admission.prefix.tokens.predicted"
PREFIX_MEASURED: Final = "admission.prefix.tokens.measured"
NO_ENGINE_FITS: Final = "admission.no_engine_fits"

# Metrics of the sizes of leases, where output lengths are learned.
LEASE_HELD_TOKENS: Final = "admission.lease.held.tokens"
LEASE_EXPECTED_TOKENS: Final = "admission.lease.expected.tokens"
LEASE_USED_TOKENS: Final = "admission.lease.used.tokens"
LEASE_OVERLAP: Final = "admission.lease.overlap"
LEASE_QUANTILE: Final = "admission.lease.quantile"
LEASE_QUANTILE_RAISED: Final = "admission.lease.quantile_raised"
ENGINE_PREEMPTIONS: Final = "admission.engine.preemptions"

# Metrics of service gain, where a tier has an objective. The first two are also attributes of spans.
GAIN_EARNED: Final = "admission.gain.earned"
GAIN_ATTAINABLE: Final = "admission.gain.attainable"
SLO_REQUESTS: Final = "admission.slo.requests"
ENGINE_PREFILL_TIME: Final = "admission.engine.time.prefill_token"
ENGINE_OUTPUT_TIME: Final = "admission.engine.time.output_token"
ENGINE_TOKEN_TIME: Final = "admission.engine.time.between_tokens"
ENGINE_FIRST_ERROR: Final = "admission.engine.prediction_error.first_token"
ENGINE_TOKEN_ERROR: Final = "admission.engine.prediction_error.between_tokens"

# Metrics of a shared pool's store.
STORE_AVAILABLE: Final = "admission.store.available"
STORE_CHANGES: Final = "admission.store.changes"
STORE_ROUND_TRIP: Final = "admission.store.round_trip"

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
