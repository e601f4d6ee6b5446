"""Two real processes compare their plans over loopback."""

import time

import processes
import pytest

from xcoll import _compat, agreement
from xcoll.errors import XcollWarning

WORKER = """
import time

from xcoll import agreement
from xcoll.errors import PlanMismatchError



def attempt(name, *args, **kwargs):
    start = time.monotonic()
    try:
        agreement.agree(*args, **kwargs)
        results[name] = ["agreed", ""]
    except (PlanMismatchError, TimeoutError) as error:
        results[name] = [type(error).__name__, str(error)]
    results[name].append(time.monotonic() - start)


mesh = jax.sharding.Mesh(jax.devices(), ("device",))
mine = jax.sharding.Mesh(jax.local_devices(), ("device",))
results["participants"] = [agreement.participants(mesh), agreement.participants(mine)]
both = agreement.participants(mesh)
plan = f"all_reduce over device: ring (as process {here} sees it)"

attempt("alike", "train", "aaaa", plan, both, timeout_s=30)
attempt("unlike", "step", f"print{here}", plan, both, timeout_s=30)
attempt("again unlike", "train", f"bbb{here}", plan, both, timeout_s=30)
attempt("again alike", "train", "cccc", plan, both, timeout_s=30)
attempt("alone", "mine", "dddd", plan, agreement.participants(mine), timeout_s=30)
attempt("not asked", "other", "eeee", plan, [1 - here], timeout_s=30)
if here == 0:
    attempt("missing", "absent", "ffff", plan, both, timeout_s=1)
attempt("after", "end", "gggg", plan, both, timeout_s=30)  # keeps both here until all is done
"""


@pytest.fixture(scope="module")
def results():
    """What each process saw; both have ended."""
    return processes.run(WORKER)


@pytest.mark.parametrize("name", ["alike", "again alike", "after"])
def test_same_plans_agree(results, name):
    assert [r[name][0] for r in results] == ["agreed", "agreed"]


@pytest.mark.parametrize(
    ("name", "prints"),
    [("unlike", ("print0", "print1")), ("again unlike", ("bbb0", "bbb1"))],
)
def test_different_plans_are_an_error_on_every_process(results, name, prints):
    for here, result in enumerate(results):
        kind, message, seconds = result[name]
        assert kind == "PlanMismatchError"
        assert f"this is process {here}" in message
        for process, fingerprint in enumerate(prints):
            assert f"process {process}: fingerprint {fingerprint}" in message
            assert f"ring (as process {process} sees it)" in message
        assert seconds < 30, "told at once, not at the timeout"


def test_a_process_that_does_not_come_is_named_in_bounded_time(results):
    kind, message, seconds = results[0]["missing"]
    assert kind == "TimeoutError"
    assert "process 0 waited 1 s" in message
    assert "process 1 did not answer" in message
    assert 0.9 < seconds < 10


def test_only_processes_that_own_devices_of_the_mesh_take_part(results):
    for result in results:
        assert result["participants"] == [[0, 1], []]
        assert result["alone"][0] == result["not asked"][0] == "agreed"
        assert result["alone"][2] < 5 and result["not asked"][2] < 5


def test_a_single_process_has_nobody_to_agree_with():
    import jax

    mesh = jax.sharding.Mesh(jax.devices(), ("device",))
    assert agreement.participants(mesh) == ()
    start = time.monotonic()
    agreement.agree("k", "f", "s", agreement.participants(mesh))
    agreement.agree("k", "f", "s", (0,))
    assert time.monotonic() - start < 5


def test_without_jax_distributed_it_says_that_nothing_was_compared(monkeypatch):
    monkeypatch.setattr(_compat, "key_value_client", lambda: None)
    with pytest.warns(XcollWarning, match=r"\[0, 1\] run one program.*not initialised"):
        agreement.agree("k", "f", "s", (0, 1))
