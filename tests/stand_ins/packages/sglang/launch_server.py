"""From sglang/launch_server.py: the default mode. `python -m sglang.launch_server` and `sglang serve` both run it."""


def run_server(server_args):
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(server_args)
