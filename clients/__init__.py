"""What runs on a user's device: check in, compute an update, clip, add noise, seal, submit.

`make_client_app` gives the Flower ClientApp of a simulation, `serve_device` the process of a
deployed node; the rest are their parts, each usable alone. Coins and the noisy report itself are in
`shufl.protocol.mechanisms`.

A deployed node is three services under three accounts, and what they start:

    server's machine           node's machine
    ------------------         -----------------------------------------------------------------
    Flower's SuperLink <-TLS-> shufl-supernode     account shufl-flower: the key for Flower
                                  |  a port of loopback
                               flower-superexec    account shufl-app: no key of Flower's, and no
                                  |                network but loopback
                                  |  starts one for each message
                               flwr-clientapp      runs the code that the server sends: `relay.py`
                                  |                passes the message on, and the answer back
                                  |  gRPC over the Unix socket node.sock
    shuffler <---------TLS---- shufl node          account shufl: `node_process.py` has the keys,
                                  |                coins and the owner's ledger, and sends reports
                                  |  a pipe, and shared memory
                               worker              its child: `worker.py` has the users' records,
                                                   and computes updates

The names of `__init__.pyi` are imported when they are first used, so that the deployed ClientApp
(`shufl.clients.relay`) starts without torch.
"""

if __name__ != "shufl.clients":
    raise ImportError("this folder is a part of the package shufl: import shufl.clients")

import lazy_loader

SERVICE = "shufl.Device"
"""The gRPC service of a node's process, which the relay calls."""

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
