"""The model of a thousand workers (benchmarks/scale.py), small: it ends, and says what the code promises."""

from benchmarks.scale import Model, Simulation, check_model


def test_every_run_of_the_model_ends_and_no_two_copies_of_a_step_meet() -> None:
    model = Model(20, 4, 500, 5, heartbeat_s=10.0, mean_step_s=30.0, limit_s=60.0, loss_every_s=20.0, seed=7)
    seen = Simulation(model).run()
    assert seen.ended == 500 and seen.losses > 10 and len(seen.takeovers) > 10 and seen.timed_out
    assert min(seen.gaps) > 0
    assert max(seen.late) <= model.heartbeat_s + 1.0


def test_a_cluster_that_does_not_fit_the_model_is_found_out() -> None:
    assert check_model([2.9, 3.1, 3.4]).met
    assert not check_model([2.9, 3.1, 6.0]).met
