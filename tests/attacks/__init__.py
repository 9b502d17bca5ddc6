"""Bad input and faults: what one request, or one client, may do to a server. Nothing."""
