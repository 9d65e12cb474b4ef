"""Sections of the dashboard, and the meaning of each panel."""

from __future__ import annotations

from panels import LENT, RESERVE, Json, Query, figure, graph, table
from queries import BY_TIER, POOL, gauge, increase, largest, mean, met, promised, quantiles, rate, share, total


def now() -> list[Json]:
    """How it stands."""
    waits, starves = "admission_queue_oldest_wait_seconds", "admission_queue_longest_starvation_seconds"
    held = f"sum ({gauge('admission_held_tokens')}) / {largest('admission_capacity_tokens')}"
    return [
        figure(
            "Waiting",
            "Requests in the queues of all tiers.",
            "short",
            f"sum (admission_queue_requests{{{POOL}}})",
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
            "SLO met",
            "Of tiers with slo.hold: the share of requests within slo.ttft and slo.tpot, of those that less important "
            "work can have made late. Dashed: slo.hold.",
            "percentunit",
            [Query(met("admission_guard_requests"), BY_TIER), promised("admission_slo_hold")],
        ),
        graph(
            "Room beside an SLO",
            "Of tiers with slo.hold: less important requests are admitted while the pool is filled to less than the "
            "share. It falls when the SLO is missed, and rises again. Held below: what less important tiers hold.",
            "percentunit",
            [
                Query(gauge("admission_guard_share"), f"{BY_TIER} share"),
                Query(gauge("admission_guard_held"), f"{BY_TIER} held below"),
                Query(gauge("admission_guard_total"), f"{BY_TIER} held by all"),
            ],
        ),
        graph(
            "Queue",
            "Requests that wait. A line that rises for half an hour is a tier that gets less than it is asked for.",
            "short",
            [Query(total("admission_queue_requests", "admission_tier"), BY_TIER)],
        ),
        graph(
            "Queued tokens",
            "Tokens that those who wait will hold: prompt and output, as estimated.",
            "short",
            [Query(total("admission_queue_tokens", "admission_tier"), BY_TIER)],
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
                Query(total("admission_queue_requests", "admission_tier"), "waiting"),
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


def sizing() -> list[Json]:
    """What leases hold and use where output lengths are learned; no data with `learn: off`."""
    by, named = "admission_engine", "{{admission_engine}}"
    held, used = total("admission_lease_held_tokens", by), total("admission_lease_used_tokens", by)
    by_class = "admission_output_ratio"
    enough = f'{POOL}, {by_class}=~"0.25|0.5|0.75|1"'
    covered = f"sum by (admission_tier) (rate(admission_output_answers_total{{{enough}}}[$__rate_interval]))"
    preempted = f"max by ({by}) (rate(admission_engine_preemptions_total{{{POOL}}}[$__rate_interval]))"
    return [
        graph(
            "Leases held and used",
            "Tokens of running requests: what their leases hold, what they are expected to use at their ends, as a "
            "plain sum, and what they use now. Below expected, held counts that they end at different times.",
            "short",
            [
                Query(held, f"{named} held"),
                Query(total("admission_lease_expected_tokens", by), f"{named} expected"),
                Query(used, f"{named} used"),
            ],
        ),
        graph(
            "Used of what is held",
            "Tokens that running requests use now, as a part of what their leases hold. Above 100% the engine is "
            "fuller than the pool says.",
            "percentunit",
            [Query(f"{used} / {held}", named)],
        ),
        graph(
            "Quantile and overlap",
            "The quantile that leases hold of the output lengths, and the part of what requests need that is counted. "
            "The engine's preemptions raise the quantile.",
            "percentunit",
            [
                Query(gauge("admission_lease_quantile", by), f"{named} quantile"),
                Query(gauge("admission_lease_overlap", by), f"{named} overlap"),
            ],
        ),
        graph(
            "Longer than expected",
            "The part of complete answers that were longer than what their leases held for them at first. With a "
            "quantile of 95%, about 5% are.",
            "percentunit",
            [Query(f"1 - {covered} / {rate('admission_output_answers', 'admission_tier')}", BY_TIER)],
        ),
        graph(
            "Lengths to expected",
            "Complete answers by their length in parts of what was expected: up to so much.",
            "suffix: answers/s",
            [Query(rate("admission_output_answers", by_class), f"{{{{{by_class}}}}}")],
            stacked=True,
        ),
        graph(
            "Growths and preemptions by the engine",
            "How often a lease grew while its answer streamed, by tier; and how often the engine preempted a running "
            "request for lack of KV cache, by engine.",
            "cps",
            [
                Query(rate("admission_lease_growths", "admission_tier"), f"{BY_TIER} growths"),
                Query(preempted, f"{named} preempted by the engine"),
            ],
        ),
    ]


def gaining() -> list[Json]:
    """Tokens before their deadlines, and the engines' speed; no data where no tier has an objective."""
    by, named = "admission_engine", "{{admission_engine}}"
    tier = "admission_tier"
    outcomes = rate("admission_slo_requests", "admission_slo")
    met = f'sum by ({tier}) (rate(admission_slo_requests_total{{{POOL}, admission_slo="met"}}[$__rate_interval]))'
    earned, attainable = rate("admission_gain_earned", tier), rate("admission_gain_attainable", tier)
    return [
        graph(
            "Service gain",
            "Weighted output tokens that came before their deadlines, as a part of all that were offered (TDG). "
            "Refused and abandoned requests count.",
            "percentunit",
            [
                Query(f"{earned} / {attainable}", BY_TIER),
                Query(f"{rate('admission_gain_earned')} / {rate('admission_gain_attainable')}", "all tiers"),
            ],
        ),
        graph(
            "Objectives met",
            "Requests that met the ttft and tpot of their tier, as a part of all that were offered.",
            "percentunit",
            [Query(f"{met} / {rate('admission_slo_requests', tier)}", BY_TIER)],
        ),
        graph(
            "Outcomes by objective",
            "Offered requests: met, late with the first token (ttft), slow after it (tpot), refused, abandoned.",
            "reqps",
            [Query(outcomes, "{{admission_slo}}")],
            stacked=True,
        ),
        graph(
            "Time per token",
            "The engine's time for a token of a prompt and of an output, and the time between two tokens of an answer.",
            "s",
            [
                Query(mean("admission_engine_time_prefill_token_seconds", by), f"{named} prompt"),
                Query(mean("admission_engine_time_output_token_seconds", by), f"{named} output"),
                Query(mean("admission_engine_time_between_tokens_seconds", by), f"{named} between tokens"),
            ],
        ),
        graph(
            "Prediction error",
            "Mean error of the predicted times, in parts of the larger of predicted and actual time.",
            "percentunit",
            [
                Query(mean("admission_engine_prediction_error_first_token", by), f"{named} first token"),
                Query(mean("admission_engine_prediction_error_between_tokens", by), f"{named} between tokens"),
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


def engines() -> list[Json]:
    """The engines of a pool of several; no data in a pool of one."""
    by, named = "admission_engine", "{{admission_engine}}"
    unusable = 'admission_engine_state=~"suspect|down|unreachable"'
    held = f"{gauge('admission_engine_held_tokens', by)} / {gauge('admission_engine_capacity_tokens', by)}"
    prompts = rate("admission_prompt_tokens", by)
    return [
        table(
            "Engine states",
            "The state of each engine as each replica sees it. Two rows of one engine: its replicas differ.",
            "short",
            ["admission_engine", "admission_engine_state", "instance"],
            [
                Query(
                    f"{gauge('admission_engine_state', 'admission_engine, admission_engine_state, instance')} == 1",
                    "is",
                )
            ],
        ),
        graph(
            "Engines that cannot be used",
            "1 while a replica finds the engine down, suspect or unreachable.",
            "short",
            [Query(f"max by ({by}) (admission_engine_state{{{POOL}, {unusable}}})", named)],
        ),
        graph(
            "Engines held",
            "Tokens that leases hold on the engine, as a part of its capacity. One far below the others is slow, "
            "starts, or gets few of the prompts that it has cached.",
            "percentunit",
            [Query(held, named)],
        ),
        graph(
            "Un-prefilled",
            "Prompt tokens that were sent to the engine and not answered with a first byte yet.",
            "short",
            [Query(gauge("admission_engine_unprefilled_tokens", by), named)],
        ),
        graph(
            "Claims",
            "Requests in line for this engine, although others may have room: most often for their prefix.",
            "short",
            [Query(gauge("admission_engine_claims", by), named)],
        ),
        graph(
            "In flight",
            "Admitted requests at the engine, of all replicas.",
            "short",
            [Query(total("admission_engine_in_flight", by), named)],
        ),
        graph(
            "Prefix hits",
            "The part of the prompt tokens that the engine was predicted to have cached, and that it reported. "
            "Far apart: the size of its cache is not what it says.",
            "percentunit",
            [
                Query(f"{rate('admission_prefix_tokens_predicted', by)} / {prompts}", f"{named} predicted"),
                Query(f"{rate('admission_prefix_tokens_measured', by)} / {prompts}", f"{named} measured"),
            ],
        ),
        graph(
            "Ejections",
            "How often a replica stopped to use an engine, by what it found.",
            "short",
            [
                Query(
                    increase("admission_engine_ejections", "admission_engine, admission_reason"),
                    f"{named} {{{{admission_reason}}}}",
                )
            ],
        ),
        graph(
            "Replays",
            "Requests that left an engine before the first byte of their answer, and waited again, by the reason.",
            "reqps",
            [
                Query(
                    rate("admission_replays", "admission_engine, admission_reason"), f"{named} {{{{admission_reason}}}}"
                )
            ],
        ),
        graph(
            "No engine fits",
            "The part of the time in which a request fitted the pool, and waited for its own engine. Near 1 with room "
            "in the pool: the engines are too small for these requests, or prefix affinity is weighted too high.",
            "percentunit",
            [
                Query(
                    f"max by (instance) (rate(admission_no_engine_fits_seconds_total{{{POOL}}}[$__rate_interval]))",
                    "{{instance}}",
                )
            ],
        ),
    ]
