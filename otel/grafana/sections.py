"""Sections of the dashboard, and the meaning of each panel."""

from __future__ import annotations

from panels import LENT, RESERVE, Json, Query, figure, graph, table
from queries import BY_TIER, POOL, gauge, increase, largest, promised, quantiles, rate, share, total


def now() -> list[Json]:
    """How it stands."""
    waits, starves = "admission_queue_oldest_wait_seconds", "admission_queue_longest_starvation_seconds"
    held = f"sum ({gauge('admission_held_tokens')}) / {largest('admission_capacity_tokens')}"
    return [
        figure(
            "Waiting", "Requests in the queues of all tiers.", "short", f"sum ({gauge('admission_queue_requests')})"
        ),
        figure("Oldest wait", "How long the oldest of those that wait now has waited.", "s", largest(waits)),
        figure(
            "Longest starvation now",
            "Of those that wait now: for how long later requests have gone ahead of one.",
            "s",
            largest(starves),
        ),
        figure("Pool held", "Tokens of running requests, as a part of the pool.", "percentunit", held),
        figure("Admitted now", "Requests that go on to the engine.", "reqps", rate("admission_admitted")),
        figure("Refused now", "Requests that are answered with an error of ours.", "reqps", rate("admission_refused")),
    ]


def waiting() -> list[Json]:
    """Who waits, and who starves."""
    return [
        graph(
            "Queue wait",
            "From arrival to admission, or to the refusal or departure of those that had waited. A point opens the "
            "trace of a request. Dashed: slo.queue_wait.",
            "s",
            [*quantiles("admission_queue_wait_seconds"), promised("admission_slo_queue_wait_seconds")],
        ),
        graph(
            "Starvation",
            "Of those that starved, when their wait ended: for how long later requests had gone ahead of them. "
            "A point opens the trace of a request. Dashed: slo.starvation.",
            "s",
            [*quantiles("admission_starvation_seconds"), promised("admission_slo_starvation_seconds")],
        ),
        graph(
            "Oldest waiter",
            "How long the oldest of those that wait now has waited. Rises with the clock while nobody of the tier is "
            "admitted. Dashed: slo.queue_wait.",
            "s",
            [
                Query(gauge("admission_queue_oldest_wait_seconds"), BY_TIER),
                promised("admission_slo_queue_wait_seconds"),
            ],
        ),
        graph(
            "Longest starvation",
            "Of those that wait now: who has been overtaken for the longest. Dashed: slo.starvation.",
            "s",
            [
                Query(gauge("admission_queue_longest_starvation_seconds"), BY_TIER),
                promised("admission_slo_starvation_seconds"),
            ],
        ),
        graph(
            "Time to first token",
            "From arrival at the sidecar to the first byte of a streamed answer. What of it is not queue wait is the "
            "engine's. A point opens the trace of a request. Dashed: slo.ttft.",
            "s",
            [*quantiles("admission_time_to_first_token_seconds"), promised("admission_slo_ttft_seconds")],
        ),
        graph(
            "Queue",
            "Requests that wait. A line that rises for half an hour is a tier that gets less than it is asked for.",
            "short",
            [Query(gauge("admission_queue_requests"), BY_TIER)],
        ),
        graph(
            "Queued tokens",
            "Tokens that those who wait will hold: prompt and output, as estimated.",
            "short",
            [Query(gauge("admission_queue_tokens"), BY_TIER)],
        ),
        graph(
            "Gave up waiting",
            "Left the queue before their turn: the client disconnected, or the server ended.",
            "reqps",
            [
                Query(
                    rate("admission_abandoned", "admission_tier, admission_reason"),
                    f"{BY_TIER} {{{{admission_reason}}}}",
                )
            ],
        ),
    ]


def holding() -> list[Json]:
    """Who holds the pool."""
    return [
        graph(
            "Share held",
            "Tokens that a tier's running requests hold, as a part of the pool. Dashed: its reserve. A tier below its "
            "reserve that waits is about to get it back; one above holds what others left idle.",
            "percentunit",
            [
                Query(share("admission_held_tokens"), BY_TIER),
                Query(share("admission_reserve_tokens"), f"{BY_TIER} {RESERVE}"),
            ],
        ),
        graph(
            "Pool, filled tier by tier",
            "The same, stacked: up to 100% the pool is full.",
            "percentunit",
            [Query(share("admission_held_tokens"), BY_TIER)],
            stacked=True,
        ),
        graph(
            "Borrowed and lent",
            "Upwards, tokens that a tier holds beyond its reserve out of the idle reserves of others; downwards, "
            "tokens of its own idle reserve that others hold.",
            "short",
            [
                Query(gauge("admission_borrowed_tokens"), f"{BY_TIER} borrowed"),
                Query(gauge("admission_lent_tokens"), f"{BY_TIER} {LENT}"),
            ],
        ),
        table(
            "Tiers",
            "Now, in tokens and in requests. A tier without a limit, or a pool without bounds, has an empty field.",
            "short",
            ["admission_tier"],
            [
                Query(gauge("admission_held_tokens"), "tokens held"),
                Query(gauge("admission_reserve_tokens"), "reserve"),
                Query(gauge("admission_limit_tokens"), "limit"),
                Query(gauge("admission_held_requests"), "requests held"),
                Query(gauge("admission_reserve_requests"), "reserve, requests"),
                Query(gauge("admission_limit_requests"), "limit, requests"),
                Query(gauge("admission_queue_requests"), "waiting"),
            ],
        ),
    ]


def overtaking() -> list[Json]:
    """Who goes ahead of whom, and why."""
    by = "admission_by, admission_tier, admission_rule"
    legend = "{{admission_by}} before {{admission_tier}} ({{admission_rule}})"
    return [
        graph(
            "Who goes ahead of whom",
            "Tokens a second of requests that were admitted while an earlier one of another tier waited. The rule says "
            "why: always_first, a reserve that is given back (reserve, or reserve_turn for one beyond what is left "
            "of it), a better level, a limit that the earlier one has met, or that one was too large to wait for "
            "(passed_over).",
            "suffix: tokens/s",
            [Query(rate("admission_overtaken_tokens", by), legend)],
        ),
        table(
            "Overtakings in the time shown",
            "How often, and by how many tokens, the first in line of a tier was overtaken.",
            "short",
            ["admission_tier", "admission_by", "admission_rule"],
            [
                Query(increase("admission_overtaken", by), "requests"),
                Query(increase("admission_overtaken_tokens", by), "tokens"),
            ],
        ),
        *preempting(),
    ]


def preempting() -> list[Json]:
    """Who gave way when it ran already, and what that cost."""
    lost = rate("admission_preempted_engine_time_seconds", "admission_tier")
    running = f"clamp_min(sum ({gauge('admission_held_requests')}), 1)"
    return [
        graph(
            "Preemptions",
            "Requests of the tier that gave their room to a more important one before their first byte, and waited "
            "again.",
            "cps",
            [Query(rate("admission_preemptions", "admission_tier"), BY_TIER)],
        ),
        graph(
            "Engine time lost",
            "For how long the engine had worked on what was preempted then, as a part of the time of all that ran. "
            "All of it is done again.",
            "percentunit",
            [Query(f"{lost} / on () group_left () {running}", BY_TIER)],
        ),
    ]


def deciding() -> list[Json]:
    """Admitted, refused, clamped, and how good the estimates are."""
    error = rate("admission_tokens_estimate_error", "admission_tier, admission_direction")
    used = rate("admission_tokens_used", "admission_tier")
    return [
        graph(
            "Admitted",
            "Requests that go on to the engine.",
            "reqps",
            [Query(rate("admission_admitted", "admission_tier"), BY_TIER)],
        ),
        graph(
            "Refused",
            "Answered with an error of ours. queue_full, queue_timeout: the tier's own queue settings; "
            "store_unavailable: the shared pool. Without a tier: refused before one was known, as for an invalid key.",
            "reqps",
            [
                Query(
                    rate("admission_refused", "admission_tier, admission_reason"), f"{BY_TIER} {{{{admission_reason}}}}"
                )
            ],
        ),
        graph(
            "Outcomes",
            "How admitted requests ended.",
            "reqps",
            [
                Query(
                    rate("admission_settled", "admission_tier, admission_outcome"),
                    f"{BY_TIER} {{{{admission_outcome}}}}",
                )
            ],
        ),
        graph(
            "Clamped",
            "Asked for a better tier than their tenant may have, and got the best that it may.",
            "reqps",
            [
                Query(
                    rate("admission_clamped", "admission_clamped_from, admission_tier"),
                    f"{{{{admission_clamped_from}}}} to {BY_TIER}",
                )
            ],
        ),
        graph(
            "Estimate error",
            "Tokens reserved too many (over) or too few (under), as a part of the tokens used. What is over stands "
            "idle while requests run; what is under lets the engine be fuller than the pool says.",
            "percentunit",
            [
                Query(
                    f"{error} / on (admission_tier) group_left () {used}",
                    f"{BY_TIER} {{{{admission_direction}}}}",
                )
            ],
        ),
        graph(
            "Tokens",
            "Tokens a second: reserved when a request came, and used when it ended.",
            "suffix: tokens/s",
            [
                Query(rate("admission_tokens_estimated", "admission_tier"), f"{BY_TIER} estimated"),
                Query(used, f"{BY_TIER} used"),
            ],
        ),
    ]


def tenants() -> list[Json]:
    """The largest tenants, and all others as one."""
    by, legend = "admission_tenant", "{{admission_tenant}}"
    return [
        graph(
            "Tokens held by tenant",
            "Of running requests: each replica counts its own.",
            "short",
            [Query(total("admission_tenant_tokens_held", by), legend)],
            stacked=True,
        ),
        graph(
            "Tokens used by tenant",
            "A second.",
            "suffix: tokens/s",
            [Query(rate("admission_tenant_tokens_used", by), legend)],
        ),
        graph(
            "Admitted by tenant",
            "Requests that go on to the engine.",
            "reqps",
            [Query(rate("admission_tenant_admitted", by), legend)],
        ),
        graph(
            "Refused by tenant",
            "Answered with an error of ours.",
            "reqps",
            [Query(rate("admission_tenant_refused", by), legend)],
        ),
    ]


def operating() -> list[Json]:
    """The engine, the shared pool's store, and the policies that the replicas run."""
    states = rate("admission_store_changes", "admission_store_state")
    return [
        graph(
            "Engine up",
            "1 while the engine that the policy names answers a replica; 0 while requests wait for it.",
            "short",
            [Query(f"min by (instance) (admission_engine_up{{{POOL}}})", "{{instance}}")],
        ),
        graph(
            "Store round trip",
            "One call to the shared pool's store. Every admission that has to wait for one takes this much longer.",
            "s",
            quantiles("admission_store_round_trip_seconds", by=(), legend=""),
        ),
        graph(
            "Store available",
            "1 while the store decides for a replica; 0 before the first contact, and while the store is lost to it.",
            "short",
            [Query(f"min by (instance) (admission_store_available{{{POOL}}})", "{{instance}}")],
        ),
        graph(
            "Store changes",
            "How often the store was reached, lost or back, by the state that followed.",
            "cps",
            [Query(states, "{{admission_store_state}}")],
        ),
        graph(
            "Replicas",
            "That share the pool, as each of them sees it.",
            "short",
            [Query(gauge("admission_replicas", "instance"), "{{instance}}")],
        ),
        table(
            "Policies",
            "The generation of the policy that each replica runs. All of one pool should be the same.",
            "short",
            ["instance", "admission_policy_generation"],
            [Query(gauge("admission_policy_info", "instance, admission_policy_generation"), "runs")],
        ),
        graph(
            "Policies rejected",
            "Changed policy files that could not be used. The log of the replica, and `sidecar check`, say why.",
            "short",
            [Query(increase("admission_policy_rejected", "instance"), "{{instance}}")],
        ),
    ]
