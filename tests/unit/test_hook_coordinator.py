# SPDX-License-Identifier: Apache-2.0
"""HookCoordinator: two threads alternate, and neither waits for one who failed, finished or never came."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hyper_parallel.core.pipeline_parallel import HookCoordinator
from hyper_parallel.core.pipeline_parallel.hook_coordinator import (
    HookCoordinator as FromItsModule,
)

COMM, COMPUTE = HookCoordinator.COMM, HookCoordinator.COMPUTE
SHORT = 0.05  # long enough to see that a thread waits


@pytest.fixture
def coordinator():
    coordinator = HookCoordinator(timeout=5.0)
    coordinator.enable()
    return coordinator


def in_threads(*functions):
    """What the functions, each in a thread of its own, returned or raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.exception(20) or future.result() for future in futures]


def start(function, *args):
    """A thread under way: has .ended() after a while and .error."""
    thread = Waiter(function, args)
    thread.start()
    return thread


class Waiter(threading.Thread):
    def __init__(self, function, args):
        super().__init__(daemon=True)
        self.function, self.args, self.error = function, args, None

    def run(self):
        try:
            self.function(*self.args)
        except Exception as error:
            self.error = error

    def ended(self, seconds=5.0):
        self.join(seconds)
        return not self.is_alive()

    def waits(self):
        return not self.ended(SHORT)


def until_someone_waits(coordinator):
    deadline = time.monotonic() + 5
    while coordinator._forming is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_is_exported():
    assert FromItsModule is HookCoordinator
    assert (COMM, COMPUTE) == ("COMM", "COMPUTE")


@pytest.mark.parametrize(
    "notifies", ["never", "once", "twice", "as the platform's hooks do"]
)
def test_each_round_has_one_comm_that_is_launched_before_the_other_computes(
    coordinator, notifies
):
    rounds = 300
    log = []  # appends are atomic

    def side(name, first_role):
        role = first_role
        for number in range(rounds):
            if role == COMPUTE and notifies == "as the platform's hooks do":
                coordinator.notify_dispatched(COMM)
            log.append((number, name, "comes", role))
            coordinator.rendezvous(role)
            log.append((number, name, "goes on", role))
            if role == COMM:
                if number % 7 == 0:
                    time.sleep(0.0005)  # let COMPUTE run ahead if it could
                log.append((number, name, "launches", role))
                for _ in range({"once": 1, "twice": 2}.get(notifies, 0)):
                    coordinator.notify_dispatched(COMM)
            role = COMM if role == COMPUTE else COMPUTE
        coordinator.disable()

    assert in_threads(lambda: side("x", COMM), lambda: side("y", COMPUTE)) == [
        None,
        None,
    ]
    place = {event: at for at, event in enumerate(log)}
    for number in range(rounds):
        comm, compute = ("x", "y") if number % 2 == 0 else ("y", "x")
        comm_goes_on = place[number, comm, "goes on", COMM]
        assert place[number, comm, "comes", COMM] < comm_goes_on
        assert place[number, compute, "comes", COMPUTE] < comm_goes_on
        # After the last round a side may be let go by disable() instead.
        assert (
            place[number, comm, "launches", COMM]
            < place[number, compute, "goes on", COMPUTE]
        )


def test_comm_waits_for_compute_and_compute_for_the_launch(coordinator):
    comm = start(coordinator.rendezvous, COMM)
    assert comm.waits()
    compute = start(coordinator.rendezvous, COMPUTE)
    assert comm.ended()
    assert compute.waits()
    coordinator.notify_dispatched(COMPUTE)  # not what compute waits for
    assert compute.waits()
    coordinator.notify_dispatched(COMM)
    assert compute.ended()
    assert comm.error is compute.error is None


def test_coming_to_the_next_round_counts_as_launched(coordinator):
    compute = start(coordinator.rendezvous, COMPUTE)
    coordinator.rendezvous(COMM)
    assert compute.waits()
    again = start(coordinator.rendezvous, COMM)
    assert compute.ended()
    assert again.waits()
    coordinator.disable()
    assert again.ended()


def test_a_notify_before_both_have_come_is_for_no_round(coordinator):
    coordinator.notify_dispatched(COMM)  # nobody is here
    comm = start(coordinator.rendezvous, COMM)
    until_someone_waits(coordinator)
    coordinator.notify_dispatched(
        COMM
    )  # comm still waits: it cannot have launched anything
    compute = start(coordinator.rendezvous, COMPUTE)
    assert comm.ended()
    assert compute.waits()
    coordinator.notify_dispatched(COMM)
    assert compute.ended()


@pytest.mark.parametrize("waiting_as", [COMM, COMPUTE])
@pytest.mark.parametrize("failing_after", [0, 1, 4])
def test_a_side_that_fails_releases_the_other(coordinator, waiting_as, failing_after):
    failure = KeyError("the cause")
    failing_as = COMM if waiting_as == COMPUTE else COMPUTE

    def runs_on():
        with coordinator.side():
            for _ in range(failing_after + 1):
                coordinator.rendezvous(waiting_as)

    def fails():
        with coordinator.side():
            for _ in range(failing_after):
                coordinator.rendezvous(failing_as)
            raise failure

    before = time.monotonic()
    released, own = in_threads(runs_on, fails)
    assert time.monotonic() - before < 4
    assert own is failure
    assert type(released) is RuntimeError
    assert released.__cause__ is failure
    assert "KeyError: 'the cause'" in str(released)
    assert waiting_as in str(released)


def test_abort_releases_compute_that_waits_for_the_launch(coordinator):
    compute = start(coordinator.rendezvous, COMPUTE)
    coordinator.rendezvous(COMM)
    assert compute.waits()
    coordinator.abort(OSError("link down"))
    assert compute.ended()
    assert isinstance(compute.error, RuntimeError)
    assert isinstance(compute.error.__cause__, OSError)


def test_after_an_abort_every_rendezvous_raises_with_the_first_error(coordinator):
    first = ValueError("first")
    coordinator.abort(first)
    coordinator.abort(ValueError("second"))
    for role in (COMM, COMPUTE, COMM):
        with pytest.raises(RuntimeError, match="first") as caught:
            coordinator.rendezvous(role)
        assert caught.value.__cause__ is first
    coordinator.notify_dispatched(COMM)  # says nothing to nobody


def test_abort_without_an_error(coordinator):
    coordinator.abort()
    with pytest.raises(RuntimeError, match=r"abort\(\) was called"):
        coordinator.rendezvous(COMM)


def test_enable_clears_an_abort(coordinator):
    coordinator.abort(ValueError())
    coordinator.enable()
    meets_once(coordinator)


def test_disable_lets_pass_after_an_abort(coordinator):
    coordinator.abort(ValueError())
    coordinator.disable()
    coordinator.rendezvous(COMM)


def test_abort_while_disabled_does_not_reach_the_next_run():
    coordinator = HookCoordinator(timeout=5.0)
    coordinator.abort(ValueError())
    coordinator.rendezvous(COMM)
    coordinator.enable()
    meets_once(coordinator)


def meets_once(coordinator):
    compute = start(coordinator.rendezvous, COMPUTE)
    coordinator.rendezvous(COMM)
    coordinator.notify_dispatched(COMM)
    assert compute.ended()
    assert compute.error is None


@pytest.mark.parametrize(("role", "missing"), [(COMM, COMPUTE), (COMPUTE, COMM)])
def test_a_partner_that_never_comes_is_named(role, missing):
    coordinator = HookCoordinator(timeout=SHORT)
    coordinator.enable()
    with pytest.raises(
        TimeoutError, match=f"waited 0.05 s as {role}, but no side came as {missing}"
    ) as caught:
        coordinator.rendezvous(role)
    # Who comes too late hears of it at once.
    with pytest.raises(RuntimeError) as late:
        coordinator.rendezvous(missing)
    assert late.value.__cause__ is caught.value
    coordinator.enable()
    coordinator._timeout = 5.0
    meets_once(coordinator)


def test_a_launch_that_never_comes_is_named():
    coordinator = HookCoordinator(timeout=4 * SHORT)
    coordinator.enable()
    compute = start(coordinator.rendezvous, COMPUTE)
    coordinator.rendezvous(COMM)
    assert compute.ended()
    assert isinstance(compute.error, TimeoutError)
    assert "did not launch" in str(compute.error)


@pytest.mark.parametrize("role", [COMM, COMPUTE])
def test_both_in_the_same_role_is_an_error_on_both(coordinator, role):
    errors = in_threads(
        lambda: coordinator.rendezvous(role), lambda: coordinator.rendezvous(role)
    )
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert f"both sides came as {role}" in str(error)


@pytest.mark.parametrize("call", ["rendezvous", "notify_dispatched"])
@pytest.mark.parametrize("enabled", [True, False])
def test_an_unknown_role_is_refused(coordinator, call, enabled):
    if not enabled:
        coordinator.disable()
    with pytest.raises(
        ValueError, match=f"{call}: role must be 'COMM' or 'COMPUTE', got 'comm'"
    ):
        getattr(coordinator, call)("comm")
    assert coordinator.is_enabled() is enabled


@pytest.mark.parametrize("timeout", [0, -1.0])
def test_a_timeout_must_be_positive(timeout):
    with pytest.raises(ValueError, match="timeout"):
        HookCoordinator(timeout=timeout)


def test_disabled_nobody_waits():
    coordinator = HookCoordinator()
    assert not coordinator.is_enabled()
    for role in (COMM, COMM, COMPUTE):
        coordinator.notify_dispatched(role)
        coordinator.rendezvous(role)
    coordinator.enable()
    assert coordinator.is_enabled()


def test_disable_wakes_whoever_waits(coordinator):
    compute = start(coordinator.rendezvous, COMPUTE)
    coordinator.rendezvous(COMM)
    assert compute.waits()  # for the launch
    coordinator.disable()
    assert compute.ended()
    assert compute.error is None
    for role in (COMM, COMPUTE):
        coordinator.enable()
        waiter = start(coordinator.rendezvous, role)
        assert waiter.waits()  # for a partner
        coordinator.disable()
        assert waiter.ended()
        assert waiter.error is None


def test_disable_and_enable_at_once_do_not_hold_the_waiter_of_before(coordinator):
    for _ in range(50):
        waiter = start(coordinator.rendezvous, COMM)
        until_someone_waits(coordinator)
        coordinator.disable()
        coordinator.enable()
        assert waiter.ended()
        assert waiter.error is None
        meets_once(coordinator)


def test_an_abort_of_before_does_not_poison_the_next_run(coordinator):
    for _ in range(50):
        waiter = start(coordinator.rendezvous, COMPUTE)
        until_someone_waits(coordinator)
        coordinator.abort(ValueError())
        coordinator.enable()
        meets_once(coordinator)
        assert waiter.ended()
        assert isinstance(waiter.error, RuntimeError)


def test_enabling_twice_does_not_disturb_whoever_waits(coordinator):
    compute = start(coordinator.rendezvous, COMPUTE)
    until_someone_waits(coordinator)
    coordinator.enable()
    coordinator.rendezvous(COMM)
    coordinator.notify_dispatched(COMM)
    assert compute.ended()


def test_the_side_that_has_finished_lets_the_other_run_on(coordinator):
    passed = []

    def short():
        coordinator.rendezvous(COMM)
        coordinator.disable()

    def long():
        for number, role in enumerate([COMPUTE, COMM, COMPUTE, COMM]):
            coordinator.rendezvous(role)
            passed.append(number)

    assert in_threads(short, long) == [None, None]
    assert passed == [0, 1, 2, 3]


def test_sides_need_not_stay_on_their_threads(coordinator):
    """With CUDA a backward runs in autograd's threads: each rendezvous here comes from a new thread."""
    for number in range(20):
        comm, compute = (
            start(coordinator.rendezvous, COMM),
            start(coordinator.rendezvous, COMPUTE),
        )
        assert comm.ended()
        assert not compute.ended(0.002), number
        from_elsewhere = start(coordinator.notify_dispatched, COMM)
        assert from_elsewhere.ended()
        assert compute.ended()


def test_leaving_a_side_lets_the_other_run_on(coordinator):
    def side(roles):
        with coordinator.side():
            for role in roles:
                coordinator.rendezvous(role)

    # The last COMM says nothing more, and COMM then has nobody to meet.
    assert in_threads(lambda: side([COMM]), lambda: side([COMPUTE, COMM, COMPUTE])) == [
        None,
        None,
    ]
    assert not coordinator.is_enabled()
    coordinator.enable()
    meets_once(coordinator)
