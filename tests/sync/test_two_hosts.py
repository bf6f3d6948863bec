"""Weights through the network between two hosts: two network namespaces, joined by one cable.

A host's own name stands for 127.0.0.1 in both, as in most containers, so whoever tells the other
side that address is not reached.
"""

import shutil
import subprocess
import sys

import pytest

CABLE = """
set -e
unshare --net sleep 300 & other=$!
trap "kill $other" EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link set lo up
ip link add here type veth peer name there
ip link set there netns $other
ip addr add 10.9.0.1/24 dev here
ip link set here up
nsenter --net=/proc/$other/ns/net sh -c \
    "ip link set lo up; ip addr add 10.9.0.2/24 dev there; ip link set there up"
"$1" -c "$2" trainer & trainer=$!
nsenter --net=/proc/$other/ns/net "$1" -c "$2" engine
wait $trainer
"""
PROGRAM = """
import sys, threading
from multiprocessing.connection import Client, Listener
import torch
from isomodels.sync import Network
from isomodels.sync.blocks import Block, Blocks, Whole
from isomodels.sync.network import NetworkReceiver

CONTROL = ("10.9.0.1", 4711)
x = torch.arange(1000).float()
if sys.argv[1] == "trainer":
    with Listener(CONTROL) as listener, listener.accept() as pipe:
        def call(message):
            pipe.send(message)
            assert pipe.recv() == "ok"
        sender, held = Network("10.9.0.1", 1, timeout_s=20.0), [Whole("x", x)]
        sender.connect(call)
        with sender.offer(held) as offer:
            blocks = Blocks(Block.of(one, *at) for one, at in zip(held, offer.places))
            sender.deliver(held, lambda: call((offer.sources, blocks)))
else:
    for _ in range(600):
        try:
            pipe = Client(CONTROL)
            break
        except OSError:
            threading.Event().wait(0.1)
    receiver = NetworkReceiver(pipe.recv()["network"], 0)
    pipe.send("ok")
    sources, blocks = pipe.recv()
    with receiver.read(sources, blocks, torch.device("cpu")) as tensors:
        (got,) = [tensor.clone() for tensor in tensors]
    pipe.send("ok")
    assert torch.equal(got.view(torch.int32), x.view(torch.int32))
    print("equal bits")
"""


def may_have_namespaces() -> bool:
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip")))
    make = [
        "unshare",
        "--net",
        "ip",
        "link",
        "add",
        "here",
        "type",
        "veth",
        "peer",
        "name",
        "there",
    ]
    return tools and subprocess.run(make, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_a_worker_of_another_host_is_reached() -> None:
    if not may_have_namespaces():
        pytest.skip("no right to make network namespaces")
    command = ["unshare", "--net", "bash", "-c", CABLE, "cable", sys.executable, PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal bits\n"
