"""Runs whose weights change while answers grow: no token is too old, the record says which version drew it, and run.json
that the run is not exact."""

import json

import pytest
from resume_driver import Letters, options
from safetensors.torch import load_file

from rolecall.config.merge import ConfigError
from rolecall.experience.store import read_rollouts
from rolecall.jobs import data, running
from rolecall.policy.load import load
from rolecall.rollout.open import open_engine
from rolecall.rollout.pinned import _Watching

STEPS, AHEAD = 5, 2
INFLIGHT = {
    "steps": STEPS, "ahead": AHEAD, "inflight": True, "save.every": 1, "save.keep": 9, "sampling.max_new_tokens": 24,
}  # fmt: skip


def run(kind, out, monkeypatch, **more):
    monkeypatch.setattr(data, "open_reward", lambda *args, **kwargs: Letters())
    assert running.run(options(kind, out, **INFLIGHT | more)).outcome.step == more.get("steps", STEPS)


def check(path):
    """Staleness, runs of versions and their log-probs, of all steps; which numbers of versions answers have."""
    engine, counts = open_engine(load("tiny"), name="native"), set()
    for step in range(1, STEPS):
        version = max(0, step - AHEAD)
        for t in read_rollouts(path / "rollouts" / f"step-{step + 1:06d}.parquet").trajectories:
            sampled = [i for i, known in enumerate(t.sampled) if known]
            spans = t.versions or ((sampled[0], sampled[-1] + 1, t.policy_version),)
            assert [i for a, b, _ in spans for i in range(a, b) if t.sampled[i]] == sampled
            assert version <= t.policy_version == min(v for *_, v in spans)
            assert max(v for *_, v in spans) <= step
            counts.add(len({v for *_, v in spans}))
            for start, end, drawn_by in spans:
                if drawn_by == 0:
                    continue
                engine.load(load_file(path / "checkpoints" / f"step-{drawn_by:06d}" / "model.safetensors"), drawn_by)
                own = [x for i, x in enumerate(engine.score(t.ids), 1) if start <= i < end and t.sampled[i]]
                recorded = [t.behaviour_logprobs[i] for i in range(start, end) if t.sampled[i]]
                assert own == pytest.approx(recorded, abs=1e-4)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["async/staleness"] <= AHEAD for line in lines)
    assert json.loads((path / "run.json").read_text())["exact"].startswith("not exact")
    return counts


@pytest.fixture(autouse=True)
def updates_end_while_answers_grow(monkeypatch):
    """At the tenth token every step waits for the next version, if that does not wait for the step itself."""
    add, step = _Watching.add, _Watching.step

    def noted(self, request, **more):
        self.asked, self.tokens = request.step, getattr(self, "tokens", 0)
        return add(self, request, **more)

    def waiting(self):
        self.tokens += 1
        held, published = self._pinned.engine.version, self._pinned.published  # the trainer may pass on another now
        if self.tokens == 10 and held < self.asked:
            published.wait_until(lambda: published.version > held)
        return step(self)

    monkeypatch.setattr(_Watching, "add", noted)
    monkeypatch.setattr(_Watching, "step", waiting)


@pytest.mark.parametrize("kind", ["grpo", pytest.param("agents", marks=pytest.mark.slow)])
def test_answers_hold_tokens_of_several_versions_and_the_record_says_which(tmp_path, monkeypatch, kind):
    run(kind, tmp_path / "run", monkeypatch)
    assert check(tmp_path / "run") & {2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_take_new_weights_while_they_answer(tmp_path, monkeypatch, workers):
    """How often depends on the machine."""
    run("grpo", tmp_path / "run", monkeypatch, **{"engine.workers": workers})
    check(tmp_path / "run")


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint(tmp_path, monkeypatch):
    run("replay", tmp_path / "run", monkeypatch, steps=3)
    run("replay", tmp_path / "run", monkeypatch, resume=True)
    assert check(tmp_path / "run") & {2, 3}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["resumed"][0]["bit_exact"] is False


def test_what_cannot_change_weights_in_flight_is_refused_and_what_can_is_said(tmp_path):
    assert options("grpo", tmp_path, ahead=2, inflight=True).ahead_line.startswith(
        "asynchronous: weights change while answers grow, at most 2 versions old: not exact; corrected by token weights"
    )
    with pytest.raises(ConfigError, match=r"async\.inflight needs async\.ahead"):
        options("grpo", tmp_path, inflight=True)
    for elsewhere in ({"engine.servers": ["http://127.0.0.1:1"]}, {"engine.workers": 2, "engine.cluster": "ray"}):
        with pytest.raises(ConfigError, match=r"async\.inflight works with the native engine"):
            options("grpo", tmp_path, ahead=1, inflight=True, **elsewhere)
