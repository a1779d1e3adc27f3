"""Out of memory in the middle of a run: caches are given back, the run goes on, and no number changes."""

from __future__ import annotations

import pytest

from tests.integration.workbench import UNIFIED, probe

PROBE = probe("pressure")
CACHES = {"cache_config": {**UNIFIED, "fill": "start"}}


@pytest.mark.one_release("4.")
def test_caches_go_back_and_losses_stay(workbench, tmp_path):
    plain = workbench.known(stock=True)
    assert plain.ok, plain.explain()
    workbench.configure(blocks=CACHES)
    run = workbench.train(probe=PROBE, env={"GH200_TEST_FOLDER": str(tmp_path)})
    assert run.ok, run.explain()
    given = run.summaries[0]["details"]["pressure"]["given_back"]
    assert given
    assert "of memory left: gave back cache" in run.log()
    assert run.losses == plain.losses
    dropped = run.summaries[0]["details"]["caches"][given[0].removeprefix("cache ")]
    assert dropped["entries"] == 0


@pytest.mark.one_release("3.")
def test_where_the_gpu_shares_the_memory_a_run_ends_before_it_is_used_up(workbench, tmp_path):
    workbench.configure(blocks={"gh200_optimizations": {"enable_uvm_hints": True}})
    run = workbench.train(probe=PROBE, env={"GH200_TEST_FOLDER": str(tmp_path), "GH200_TEST_ONE_POOL": "1"})
    assert run.exit_codes == [1], run.explain()
    assert "the run ends before the machine freezes" in run.log()
    assert run.summaries[0]["status"] == "failed"
    assert "the memory that CPU and GPU share" in run.summaries[0]["reason"]
