"""Measure the learner step of bench/ranks.py on two hosts, for several speeds of the link between them.

    sudo python bench/hosts.py --json bench/results/hosts.json --seconds 20

The hosts are network namespaces on this machine, connected by a pair of virtual Ethernet devices whose bandwidth is
limited by token bucket filters. The hosts share the machine's processors; each runs one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import harness
import ranks

GIGABITS = (0.25, 1.0, 2.5)
BURST = "128kb"  # size of the token bucket: twice the largest TCP segment
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>


@contextlib.contextmanager
def linked_hosts(gigabits: float) -> Iterator[None]:
    """Create two hosts, gradscale0 and gradscale1, for the duration of the context."""

    def call(command: str) -> None:
        subprocess.run(command.split(), check=True)

    with contextlib.ExitStack() as stack:
        for host in (0, 1):
            call(f"ip netns add gradscale{host}")
            stack.callback(call, f"ip netns delete gradscale{host}")
        call("ip link add name link0 netns gradscale0 type veth peer name link1 netns gradscale1")
        for host in (0, 1):
            call(f"ip -n gradscale{host} address add 10.77.0.{host + 1}/24 dev link{host}")
            call(f"ip -n gradscale{host} link set link{host} up")
            limits = f"rate {gigabits}gbit burst {BURST} latency 50ms"
            call(f"tc -n gradscale{host} qdisc add dev link{host} root tbf {limits}")
        yield


def enter(rank: int) -> None:
    """Move this process into the network namespace of its rank's host."""
    with open(f"/run/netns/gradscale{rank}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the host of rank {rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = f"link{rank}"


def main() -> int:
    options = harness.arguments(__doc__)
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print("bench/hosts.py needs root and iproute2; nothing was measured")
        return 0
    alone = ranks.measured(1, options.seconds)
    links = []
    for gigabits in GIGABITS:
        with linked_hosts(gigabits):
            result = ranks.measured(2, options.seconds, enter)
        links.append({"gigabits": gigabits, "measured": result})
        print(links[-1])
    if options.json:
        machine = {**harness.machine(), "threads": "1 per process"}
        options.json.write_text(json.dumps({"machine": machine, "alone": alone, "links": links}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
