"""The invariants of the admission rules, each one function that raises where a witness saw it broken."""

from __future__ import annotations

from witness import Witness


def leases_never_exceed_the_pool_but_for_resizes_that_outgrow_it(witness: Witness) -> None:
    for decision in witness.latest:
        for used, capacity in zip(decision.used_after, witness.record.policy.capacity, strict=True):
            assert capacity is None or used <= capacity, f"{decision.request.id} filled {used} of {capacity}"
    assert witness.outgrown or not witness.over_the_pool()


def whoever_is_first_in_order_after_a_dispatch_does_not_fit(witness: Witness) -> None:
    if witness.dispatched:
        first = witness.record.first(witness.now_us)
        assert first is None or not witness.record.fits(first, witness.now_us), f"{first.id} fits and waits"


def whoever_is_admitted_was_first_in_order_and_fitted(witness: Witness) -> None:
    for decision in witness.latest:
        assert decision.first_in_order == decision.request.id, f"{decision.request.id} went before the first"
        assert decision.fitted, f"{decision.request.id} did not fit"


def a_floor_is_a_floor(witness: Witness) -> None:
    for decision in witness.latest:
        others = set(decision.tiers_below_with_a_candidate) - {decision.request.tier}
        assert decision.own_tier_is_below or not others, f"{decision.request.id} went before the floors of {others}"


def no_tenant_overtakes_itself_inside_a_tier(witness: Witness) -> None:
    for decision in witness.latest:
        assert decision.earlier_of_same_tenant == (), decision.request.id


def service_of_backlogged_tenants_differs_by_one_largest_ticket_each(witness: Witness) -> None:
    assert witness.unfair == []


def every_ticket_ends_once_and_ending_it_twice_changes_nothing(witness: Witness) -> None:
    record, scheduler = witness.record, witness.scheduler
    assert witness.disagreements == []
    assert all(ends == 1 for ends in witness.ends.values()), witness.ends
    still_here = len(record.waiting()) + len(record.held())
    assert len(record.submitted) == len(witness.ends) + still_here
    assert (scheduler.waiting(), scheduler.leases()) == (len(record.waiting()), len(record.held()))


def the_figures_of_every_tier_are_those_of_the_record(witness: Witness) -> None:
    for tier in range(len(witness.record.policy.tiers)):
        waiting = witness.record.waiting(tier)
        assert witness.scheduler.held(tier) == witness.record.used(tier)
        assert witness.scheduler.queued(tier) == (sum(r.tokens for r in waiting), len(waiting))


def starvation_is_what_the_record_of_all_admissions_says(witness: Witness) -> None:
    for decision in witness.latest:
        reported = decision.reported
        assert 0 <= reported.starvation_us <= reported.queue_wait_us
        assert reported == decision.recorded


def whom_it_overtook_and_by_which_rule_is_what_the_record_says(witness: Witness) -> None:
    for decision in witness.latest:
        assert decision.said_to_overtake == decision.overtakes, decision.request.id


def only_the_first_in_order_preempts_and_only_once_it_has_waited_long_enough(witness: Witness) -> None:
    for choice in witness.chosen:
        assert choice.had_waited_long_enough, choice


def victims_are_less_important_preemptible_and_not_kept(witness: Witness) -> None:
    for choice in witness.chosen:
        assert choice.not_allowed == (), choice


def nobody_is_preempted_more_often_than_the_policy_says(witness: Witness) -> None:
    for choice in witness.chosen:
        assert choice.preempted_too_often == (), choice


def a_victims_tier_is_not_below_its_reserve_without_it(witness: Witness) -> None:
    for choice in witness.chosen:
        assert choice.below_their_reserve == (), choice


def victims_are_enough_and_none_of_them_could_be_spared(witness: Witness) -> None:
    for choice in witness.chosen:
        assert choice.is_enough, choice
        assert choice.unneeded == (), choice


def freed_room_goes_to_whom_it_was_freed_for(witness: Witness) -> None:
    for choice in witness.chosen:
        assert choice.next_in is None or (choice.first and choice.next_in == choice.first.id), choice


INVARIANTS = (
    leases_never_exceed_the_pool_but_for_resizes_that_outgrow_it,
    whoever_is_first_in_order_after_a_dispatch_does_not_fit,
    whoever_is_admitted_was_first_in_order_and_fitted,
    a_floor_is_a_floor,
    no_tenant_overtakes_itself_inside_a_tier,
    service_of_backlogged_tenants_differs_by_one_largest_ticket_each,
    every_ticket_ends_once_and_ending_it_twice_changes_nothing,
    the_figures_of_every_tier_are_those_of_the_record,
    starvation_is_what_the_record_of_all_admissions_says,
    whom_it_overtook_and_by_which_rule_is_what_the_record_says,
    only_the_first_in_order_preempts_and_only_once_it_has_waited_long_enough,
    victims_are_less_important_preemptible_and_not_kept,
    nobody_is_preempted_more_often_than_the_policy_says,
    a_victims_tier_is_not_below_its_reserve_without_it,
    victims_are_enough_and_none_of_them_could_be_spared,
    freed_room_goes_to_whom_it_was_freed_for,
)
