"""What the convergence benchmark makes of losses: differences, targets, curves."""

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

FILE = Path(__file__).parent.parent / "bench" / "convergence_output.py"
SPEC = importlib.util.spec_from_file_location("convergence_output", FILE)
output = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(output)


def row(held_out: list[float], num_bytes: int, **dtypes: int) -> dict:
    losses = [[5.0 + seed, 4.0 + seed, 3.0 + seed] for seed in range(len(held_out))]
    return {
        "losses": losses,
        "held_out": held_out,
        "slow_axis_bytes": num_bytes,
        "wire_dtypes": dtypes,
    }


def variants() -> dict:
    return {
        "exact": row([2.0, 4.0], 1000, f32=1000),
        "int8": row([2.008, 4.016], 250, s8=200, f32=50),
        "int4 with feedback": row([2.06, 4.0], 130, s8=130),
    }


def test_differences_are_from_the_exact_run_of_the_same_seed():
    assert output.differences(variants(), "int8") == pytest.approx([0.004, 0.004])
    assert output.differences(variants(), "int4 with feedback") == pytest.approx([0.03, 0.0])
    # From 2 to 4, around 3.
    assert output.spread(variants()) == pytest.approx(2 / 3)


def test_targets_are_met_or_missed_by_the_mean_over_seeds():
    found = output.targets(variants())
    assert found["int8"]["met"] and found["int8"]["target"] == 0.005
    assert not found["int4 with feedback"]["met"]
    assert found["int4 with feedback"]["difference"] == pytest.approx(0.015)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_loss_that_is_lower_than_the_exact_one_is_no_better(factor):
    rows = variants()
    rows["int8"]["held_out"] = [2.0 * factor, 4.0 * factor]
    assert not output.targets(rows)["int8"]["met"]


def test_curves_are_means_over_seeds_and_steps(monkeypatch):
    monkeypatch.setattr(output, "SMOOTHED", 2)
    steps, loss = output.smoothed([[4.0, 2.0, 0.0], [6.0, 4.0, 2.0]])
    assert steps.tolist() == [2, 3]
    assert loss.tolist() == [4.0, 2.0]


def test_fewer_steps_than_are_smoothed_are_one_point():
    steps, loss = output.smoothed([[4.0, 2.0]])
    assert steps.tolist() == [2] and loss.tolist() == [3.0]


def figures() -> dict:
    return {
        "machine": "x86_64, 2 cores",
        "jax": "0",
        "parameters": 1234,
        "tokens_a_step": 512,
        "steps": 3,
        "seeds": 2,
        "seconds": 1.0,
        "variants": variants(),
    }


def test_the_table_shows_every_variant():
    shown = io.StringIO()
    Console(file=shown, width=120).print(output.table(figures()))
    lines = {
        name: line for line in shown.getvalue().splitlines() for name in variants() if name in line
    }
    assert "+0.40%" in lines["int8"] and "0.250" in lines["int8"] and "s8 80 %" in lines["int8"]
    assert "+1.50%" in lines["int4 with feedback"] and "+3.00%" in lines["int4 with feedback"]


def test_the_curves_are_a_small_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    output.plot(figures(), tmp_path / "curves.png")
    data = (tmp_path / "curves.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) < 150_000
    assert np.frombuffer(data[16:24], ">u4").tolist() == [1100, 440]
