"""What both ends of the wire share: protocol, addresses, errors, seals, reports and the clients."""
