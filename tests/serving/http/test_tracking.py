"""Metrics of a server in a tracker."""

from pathlib import Path

import pytest

from msattn.trainer.config import TrackerConfig
from msattn.trainer.serving.http.metrics import Metrics, logged
from msattn.trainer.training.tracker import Tracker
from tests.running import metrics_lines
from tests.serving.http.running import configuration, eventually, running, small_loaded


def start(folder: Path) -> Tracker:
    return Tracker.start(TrackerConfig("none"), folder=folder, run_name="serve", config={})


@pytest.mark.slow
def test_the_end_of_a_server_logs_its_requests(tmp_path: Path) -> None:
    with start(tmp_path) as tracker, running(small_loaded(tmp_path), configuration(), tracker=tracker) as served:
        answer = served.post(json={"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 4, "temperature": 0})
        assert answer.status_code == 200
        eventually(lambda: served.metric('requests_total{outcome="length"}') == 1)
    (line,) = metrics_lines(tmp_path)
    assert {
        name: line[name] for name in ("step", "requests_total/length", "prompt_tokens_total", "generated_tokens_total")
    } == {
        "step": 0,
        "requests_total/length": 1,
        "prompt_tokens_total": 3,
        "generated_tokens_total": 4,
    }
    assert 0 < line["time_to_first_token_seconds_mean"] <= line["request_duration_seconds_mean"] < 60
    assert not [name for name in line if name.endswith(("_bucket", "_created", "_sum"))]


@pytest.mark.slow
def test_metrics_are_logged_when_they_change(tmp_path: Path) -> None:
    with start(tmp_path) as tracker, running(small_loaded(tmp_path), configuration()) as served:
        metrics = Metrics(served.engine)
        with logged(metrics, tracker, seconds=0.01):
            eventually(lambda: len(metrics_lines(tmp_path)) == 1)
            metrics.refused()
            eventually(lambda: len(metrics_lines(tmp_path)) == 2)
    assert [(line["step"], line.get("requests_total/refused")) for line in metrics_lines(tmp_path)] == [(0, None), (1, 1)]
