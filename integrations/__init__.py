"""Layer-wise sharding in DeepSpeed, FSDP2 and trainers. Installed as ``lwopt_backend.integrations``."""

if __name__ != "lwopt_backend.integrations":
    raise ImportError(
        "import this package as 'lwopt_backend.integrations' (pip install the project first); "
        f"as {__name__!r} its modules would shadow the hosts they integrate with"
    )
