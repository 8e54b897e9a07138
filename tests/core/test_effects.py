"""Effects: never promise that nothing happened when something may have, never advise to do it twice."""

from itertools import product

import pytest

from shotclock.core.errors import Ending, SideEffects, may_retry, side_effects_of

BOTH = (False, True)


@pytest.mark.parametrize(("ok", "mutates"), list(product(BOTH, BOTH)))
def test_work_that_never_started_had_no_effect(ok: bool, mutates: bool):
    assert side_effects_of(ending=Ending.NOT_STARTED, ok=ok, mutates=mutates) is SideEffects.NONE


@pytest.mark.parametrize(("ending", "ok"), list(product(Ending, BOTH)))
def test_work_that_changes_nothing_had_no_effect_however_it_ended(ending: Ending, ok: bool):
    assert side_effects_of(ending=ending, ok=ok, mutates=False) is SideEffects.NONE


@pytest.mark.parametrize("ending", [ending for ending in Ending if ending is not Ending.NOT_STARTED])
def test_only_work_that_finished_well_had_its_whole_effect(ending: Ending):
    complete = side_effects_of(ending=ending, ok=True, mutates=True) is SideEffects.COMPLETE
    assert complete == (ending is Ending.FINISHED)
    assert side_effects_of(ending=ending, ok=False, mutates=True) is SideEffects.UNKNOWN


@pytest.mark.parametrize("effects", [effects for effects in SideEffects if effects is not SideEffects.NONE])
def test_what_mutates_and_is_not_idempotent_is_never_retried_once_it_may_have_had_an_effect(effects: SideEffects):
    assert not may_retry(registered=True, effects=effects, mutates=True, idempotent=False)


@pytest.mark.parametrize(("effects", "mutates", "idempotent"), list(product(SideEffects, BOTH, BOTH)))
def test_what_the_operation_declares_lowers_the_registrys_word_and_never_raises_it(
    effects: SideEffects, mutates: bool, idempotent: bool
):
    assert not may_retry(registered=False, effects=effects, mutates=mutates, idempotent=idempotent)


@pytest.mark.parametrize(("mutates", "idempotent"), list(product(BOTH, BOTH)))
def test_without_any_effect_the_registrys_word_stands(mutates: bool, idempotent: bool):
    assert may_retry(registered=True, effects=SideEffects.NONE, mutates=mutates, idempotent=idempotent)


@pytest.mark.parametrize("effects", SideEffects)
def test_an_idempotent_operation_may_be_repeated_whatever_it_did(effects: SideEffects):
    assert may_retry(registered=True, effects=effects, mutates=True, idempotent=True)


@pytest.mark.parametrize(("ending", "ok", "mutates", "idempotent"), list(product(Ending, BOTH, BOTH, BOTH)))
def test_retryable_together_with_the_derived_effects_never_repeats_a_change(
    ending: Ending, ok: bool, mutates: bool, idempotent: bool
):
    effects = side_effects_of(ending=ending, ok=ok, mutates=mutates)
    if may_retry(registered=True, effects=effects, mutates=mutates, idempotent=idempotent):
        assert idempotent or not mutates or ending is Ending.NOT_STARTED
