"""What both ends of the wire share: protocol, addresses, errors, seals, reports and the clients."""

import os

# gRPC reads it when it is imported, which is after this. Left out, a server writes a line to
# standard error for everybody who connects without a certificate, as often as they like.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
