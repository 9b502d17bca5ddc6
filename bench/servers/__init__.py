"""The servers that are measured. Each is a process of its own: `python -m bench.servers.NAME --port N`."""
