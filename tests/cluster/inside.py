"""A Slurm of its own, with two nodes, in namespaces: everything of it ends with this process.

Started by ``cluster.py`` as the first process of a PID namespace, with a network, mounts and a host name that nobody
else sees. Each node is one more set of namespaces: its own network card on a bridge, its own host name, and its own
file systems for the folders that nodes of a cluster don't share. Says ``ready`` when every node is idle; ends with its
input.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

CONTROL = "10.77.0.1"
NODES = {"n1": "10.77.0.11", "n2": "10.77.0.12"}
PATIENCE = 120.0

# proctrack/pgid signals a task's process group: as with cgroups, which need more rights, the launcher hears a signal
# and its ranks, in a session of their own, don't.
# The timeouts are a busy machine's: as Slurm sets them, a step that takes a minute to die drains its node ("Kill task
# failed"), and a node that does not answer for a while is down; nothing starts there until somebody says so.
# A job in `urgent` takes the nodes from one in another partition: at once, or after a grace time.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=control({control})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
ReturnToService=2
KillWait=180
UnkillableStepTimeout=600
MessageTimeout=60
BatchStartTimeout=120
SlurmdTimeout=0
OverTimeLimit=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
GresTypes=gpu
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=patient Nodes={names} MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=600
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""

NODE = """\
set -eu
hostname "$1"
shift
address="$1"
shift
for private in "$@"; do
    mount -t tmpfs tmpfs "$private"
done
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip address add "$address/24" dev eth0
ip link set eth0 up
ip link set lo up
exec /usr/sbin/slurmd -D -N "$(hostname)"
"""


def main(folder: Path, private: list[str]) -> None:
    run("hostname", "control")
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses().items())
    )
    run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    for step in ("link set lo up", "link add bridge type bridge", f"address add {CONTROL}/24 dev bridge"):
        run("ip", *step.split())
    run("ip", "link", "set", "bridge", "up")
    configure(folder)
    daemons = [*start_control(folder), *(start_node(name, private) for name in NODES)]
    wait_for_nodes(daemons)
    print("ready", flush=True)
    be_the_first_process(daemons)


def be_the_first_process(daemons: list[subprocess.Popen[bytes]]) -> None:
    """Reap whoever is orphaned, until our input ends.

    srun leaves a child behind that ends after it. As long as nobody reaps it, its process group exists, Slurm takes the
    step for one that can't be killed, and drains the node ("Kill task failed").
    """
    names = {daemon.pid: daemon.args for daemon in daemons}
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            if ended in names:
                sys.exit(f"{names[ended]} ended by itself")


def addresses() -> dict[str, str]:
    return {"control": CONTROL, **NODES}


def configure(folder: Path) -> None:
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    # Devices that are only counted: so a script that asks for GPUs is let in, and finds none.
    for number in range(4):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
    lines = [
        f"NodeName={name} NodeAddr={at} Sockets=1 CoresPerSocket=2 RealMemory=4000 Gres=gpu:4"
        for name, at in NODES.items()
    ]
    path = folder / "slurm.conf"
    path.write_text(CONFIGURATION.format(control=CONTROL, folder=folder, nodes="\n".join(lines), names=",".join(NODES)))
    os.environ["SLURM_CONF"] = str(path)


def start_control(folder: Path) -> list[subprocess.Popen[bytes]]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    places = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    places |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    # --force: the folder of a test run is not one that munge would choose.
    munge = ["/usr/sbin/munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in places.items())]
    daemons = [subprocess.Popen(munge, stdin=subprocess.DEVNULL, stdout=sys.stderr)]
    wait_until((folder / "munge.socket").exists, "munge's socket", daemons)
    daemons.append(subprocess.Popen(["/usr/sbin/slurmctld", "-D"], stdin=subprocess.DEVNULL, stdout=sys.stderr))
    return daemons


def start_node(name: str, private: list[str]) -> subprocess.Popen[bytes]:
    """The new namespaces' process waits for its network card, which only we can give it."""
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", NODE, "node", name, NODES[name], *private]
    node = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    wait_until(lambda: namespace(node.pid) != namespace(os.getpid()), f"the network of {name}", [node])
    run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
    run("ip", "link", "set", f"to-{name}", "master", "bridge", "up")
    return node


def namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def wait_for_nodes(daemons: list[subprocess.Popen[bytes]]) -> None:
    def idle() -> bool:
        found = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %T"], capture_output=True, text=True)
        return set(found.stdout.splitlines()) == {f"{name} idle" for name in NODES}  # a line for each partition

    wait_until(idle, "idle nodes", daemons)


def wait_until(happened, what: str, daemons: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() > deadline:
            sys.exit(f"waited for {what}; ended meanwhile: {ended}")
        time.sleep(0.1)


def run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
