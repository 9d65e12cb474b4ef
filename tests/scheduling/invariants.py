"""The invariants of the admission rules, each one function that raises where a recorder saw it broken."""

from __future__ import annotations

from oracle import INSIDE, OTHER, TURN
from recorder import Recorder


def leases_never_exceed_the_pool_but_for_resizes_that_outgrow_it(recorder: Recorder) -> None:
    for decision in recorder.latest:
        for used, capacity in zip(decision.used_after, recorder.record.policy.capacity, strict=True):
            assert capacity is None or used <= capacity, f"{decision.request.id} filled {used} of {capacity}"
    assert recorder.outgrown or not recorder.over_the_pool()


def no_ticket_waits_that_the_rules_let_in(recorder: Recorder) -> None:
    if recorder.dispatched and not recorder.record.is_paused:
        following = recorder.record.next_admission(recorder.now_us)
        assert following is None, f"{following.id} fits and waits"


def every_ticket_that_is_admitted_was_next_and_fitted(recorder: Recorder) -> None:
    for decision in recorder.latest:
        assert decision.first_in_order == decision.request.id, f"{decision.request.id} went before its time"
        assert decision.fitted, f"{decision.request.id} did not fit"


def a_floor_is_a_floor(recorder: Recorder) -> None:
    """While the pool is held back, the tickets inside their reserve and those with a turn are one class."""
    if recorder.record.is_held_back(recorder.now_us):
        return
    for decision in recorder.latest:
        if decision.order_class > INSIDE:
            assert not decision.inside_and_first, f"{decision.request.id} went before {decision.inside_and_first}"


def turns_go_round(recorder: Recorder) -> None:
    for decision in recorder.latest:
        if decision.order_class == TURN:
            assert not decision.turns_before, f"{decision.request.id} went before {decision.turns_before}"
        if decision.order_class == OTHER and not recorder.record.is_held_back(recorder.now_us):
            assert not decision.turns_before, f"{decision.request.id} went before {decision.turns_before}"


def no_tenant_overtakes_itself_inside_a_tier(recorder: Recorder) -> None:
    """But for small tickets while the tier owes: they pass larger ones, also one of their tenant that returned. That
    stands in no lane. Of the other tickets the first holds up its tenant, whatever its size.
    """
    for decision in recorder.latest:
        assert decision.earlier_of_same_tenant == (), decision.request.id


def service_of_backlogged_tenants_differs_by_one_largest_ticket_each(recorder: Recorder) -> None:
    assert recorder.unfair == []


def every_ticket_ends_once_and_ending_it_twice_changes_nothing(recorder: Recorder) -> None:
    record, scheduler = recorder.record, recorder.scheduler
    assert recorder.disagreements == []
    assert all(ends == 1 for ends in recorder.ends.values()), recorder.ends
    still_here = len(record.waiting()) + len(record.held())
    assert len(record.submitted) == len(recorder.ends) + still_here
    assert (scheduler.waiting(), scheduler.leases()) == (len(record.waiting()), len(record.held()))


def the_figures_of_every_tier_are_those_of_the_record(recorder: Recorder) -> None:
    for tier in range(len(recorder.record.policy.tiers)):
        waiting = recorder.record.waiting(tier)
        assert recorder.scheduler.held(tier) == recorder.record.used(tier)
        assert recorder.scheduler.queued(tier) == (sum(r.tokens for r in waiting), len(waiting))


def starvation_is_what_the_record_of_all_admissions_says(recorder: Recorder) -> None:
    for decision in recorder.latest:
        reported = decision.reported
        assert 0 <= reported.starvation_us <= reported.queue_wait_us
        assert reported == decision.recorded


def whom_it_overtook_and_by_which_rule_is_what_the_record_says(recorder: Recorder) -> None:
    for decision in recorder.latest:
        assert decision.said_to_overtake == decision.overtakes, decision.request.id


def a_ticket_preempts_only_once_it_has_waited_long_enough(recorder: Recorder) -> None:
    for choice in recorder.chosen:
        assert choice.had_waited_long_enough, choice


def victims_are_less_important_preemptible_and_not_kept(recorder: Recorder) -> None:
    for choice in recorder.chosen:
        assert choice.not_allowed == (), choice


def no_one_is_preempted_more_often_than_the_policy_says(recorder: Recorder) -> None:
    for choice in recorder.chosen:
        assert choice.preempted_too_often == (), choice


def a_victims_tier_is_not_below_its_reserve_without_it(recorder: Recorder) -> None:
    for choice in recorder.chosen:
        assert choice.below_their_reserve == (), choice


def victims_are_enough_and_none_of_them_could_be_spared(recorder: Recorder) -> None:
    for choice in recorder.chosen:
        assert choice.is_enough, choice
        assert choice.unneeded == (), choice


def freed_room_goes_to_whom_it_was_freed_for(recorder: Recorder) -> None:
    for choice in recorder.chosen:
        assert choice.next_in == choice.expected_next, choice


INVARIANTS = (
    leases_never_exceed_the_pool_but_for_resizes_that_outgrow_it,
    no_ticket_waits_that_the_rules_let_in,
    every_ticket_that_is_admitted_was_next_and_fitted,
    a_floor_is_a_floor,
    turns_go_round,
    no_tenant_overtakes_itself_inside_a_tier,
    service_of_backlogged_tenants_differs_by_one_largest_ticket_each,
    every_ticket_ends_once_and_ending_it_twice_changes_nothing,
    the_figures_of_every_tier_are_those_of_the_record,
    starvation_is_what_the_record_of_all_admissions_says,
    whom_it_overtook_and_by_which_rule_is_what_the_record_says,
    a_ticket_preempts_only_once_it_has_waited_long_enough,
    victims_are_less_important_preemptible_and_not_kept,
    no_one_is_preempted_more_often_than_the_policy_says,
    a_victims_tier_is_not_below_its_reserve_without_it,
    victims_are_enough_and_none_of_them_could_be_spared,
    freed_room_goes_to_whom_it_was_freed_for,
)
