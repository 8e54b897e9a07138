"""Effects: never promise that nothing happened when something may have, never advise to do it twice."""

from itertools import product

from shotclock.core.errors import Ending, SideEffects, may_retry, side_effects_of

BOTH = (False, True)


def test_work_that_never_started_had_no_effect():
    for ok, mutates in list(product(BOTH, BOTH)):
        assert side_effects_of(ending=Ending.NOT_STARTED, ok=ok, mutates=mutates) is SideEffects.NONE


def test_work_that_changes_nothing_had_no_effect_however_it_ended():
    for ending, ok in list(product(Ending, BOTH)):
        assert side_effects_of(ending=ending, ok=ok, mutates=False) is SideEffects.NONE


def test_only_work_that_finished_well_had_its_whole_effect():
    for ending in [ending for ending in Ending if ending is not Ending.NOT_STARTED]:
        complete = side_effects_of(ending=ending, ok=True, mutates=True) is SideEffects.COMPLETE
        assert complete == (ending is Ending.FINISHED)
        assert side_effects_of(ending=ending, ok=False, mutates=True) is SideEffects.UNKNOWN


def test_what_mutates_and_is_not_idempotent_is_never_retried_once_it_may_have_had_an_effect():
    for effects in [effects for effects in SideEffects if effects is not SideEffects.NONE]:
        assert not may_retry(registered=True, effects=effects, mutates=True, idempotent=False)


def test_what_the_operation_declares_lowers_the_registrys_word_and_never_raises_it():
    for effects, mutates, idempotent in list(product(SideEffects, BOTH, BOTH)):
        assert not may_retry(registered=False, effects=effects, mutates=mutates, idempotent=idempotent)


def test_without_any_effect_the_registrys_word_stands():
    for mutates, idempotent in list(product(BOTH, BOTH)):
        assert may_retry(registered=True, effects=SideEffects.NONE, mutates=mutates, idempotent=idempotent)


def test_an_idempotent_operation_may_be_repeated_whatever_it_did():
    for effects in SideEffects:
        assert may_retry(registered=True, effects=effects, mutates=True, idempotent=True)


def test_retryable_together_with_the_derived_effects_never_repeats_a_change():
    for ending, ok, mutates, idempotent in list(product(Ending, BOTH, BOTH, BOTH)):
        effects = side_effects_of(ending=ending, ok=ok, mutates=mutates)
        if may_retry(registered=True, effects=effects, mutates=mutates, idempotent=idempotent):
            assert idempotent or not mutates or ending is Ending.NOT_STARTED
