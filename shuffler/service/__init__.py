"""The gRPC service: who may call, how reports come in, and how a batch is released."""
