"""The nodes are as different as those of a cluster: host name, network, and the folders that they don't share."""

from __future__ import annotations

from pathlib import Path


def test_nodes_have_their_own_name_network_and_scratch(cluster, scratch: Path, tmp_path: Path) -> None:
    mine = scratch / "of-this-test"
    look = (
        f"mkdir -p {mine}; touch {mine}/$SLURMD_NODENAME {tmp_path}/$SLURMD_NODENAME; "
        f"echo $(hostname) $(hostname -i) $(ls {mine})"
    )
    said = cluster.run("srun", "-N2", "-n2", "sh", "-c", look)
    assert sorted(said.splitlines()) == ["n1 10.77.0.11 n1", "n2 10.77.0.12 n2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n1", "n2"], "this one is shared"
    assert not mine.exists(), "and this one is the nodes' alone"


def test_a_node_that_slurm_took_out_of_service_is_put_back(cluster) -> None:
    """A machine that stalls has its nodes drained, and the next job would wait for ever."""
    cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=Kill task failed")
    number = cluster.submit("-N2", "--wrap", "srun hostname", "--output=/dev/null")
    ended = cluster.end(number)
    assert ended.state == "COMPLETED", ended.text
    cluster.settle()
    assert set(cluster.run("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}


def test_no_job_waits_for_what_another_left(cluster) -> None:
    """srun in a script's own process group: its orphan is reaped, so the job ends and its nodes are free."""
    numbers = [cluster.submit("-N2", "--wrap", "srun true", "--output=/dev/null") for _ in range(2)]
    assert [cluster.end(number).state for number in numbers] == ["COMPLETED"] * 2
    assert not cluster.run("sinfo", "-h", "-R"), "and none was taken out of service"
