import pytest

from attnlab.training import list_checkpoints, read_metrics, read_result
from attnlab.training.checkpoints import read_checkpoint
from tests.training.jobs import assert_same_parameters, report_of, without_seconds


def killed_runs_end_like_the_whole_one(folder, kills, seed):
    report = report_of("killer", folder, kills, seed)
    assert len(report["kills"]) == kills
    whole = folder / "whole"
    last = read_checkpoint(list_checkpoints(whole)[-1])
    for name in report["runs"]:
        again = folder / name
        resumed = read_checkpoint(list_checkpoints(again)[-1])
        assert resumed.step == last.step == 20
        assert_same_parameters(resumed.model, last.model)
        assert_same_parameters(resumed.optimizer, last.optimizer)
        assert without_seconds(read_metrics(again)) == without_seconds(read_metrics(whole))
        assert read_result(again)["metrics"] == read_result(whole)["metrics"]
        assert not list(again.glob("checkpoints/.step-*"))


# Kills at every write are in test_faults.py; those at random moments take longer.
@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_bit_for_bit_like_the_uninterrupted_one(tmp_path):
    killed_runs_end_like_the_whole_one(tmp_path, kills=3, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_kills(tmp_path, seed):
    killed_runs_end_like_the_whole_one(tmp_path, kills=20, seed=seed)
