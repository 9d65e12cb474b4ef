"""From sglang/srt/server_args.py: `prepare_server_args` returns what was written, by option name and default."""

import argparse
import dataclasses


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    tokenizer_worker_num: int = 1
    enable_priority_scheduling: bool = False
    default_priority_value: int | None = None
    abort_on_priority_when_disabled: bool = False
    schedule_low_priority_values_first: bool = False
    max_running_requests: int | None = None
    skip_server_warmup: bool = False
    enable_http2: bool = False
    grpc_mode: bool = False
    smg_grpc_mode: bool = False
    grpc_port: int | None = None
    encoder_only: bool = False
    use_ray: bool = False


def prepare_server_args(argv: list[str]) -> ServerArgs:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", "--model", required=True)
    for field in dataclasses.fields(ServerArgs)[1:]:
        option = "--" + field.name.replace("_", "-")
        if field.default is False:
            parser.add_argument(option, action="store_true")
        else:
            kind = int if "int" in str(field.type) else str
            parser.add_argument(option, type=kind, default=field.default)
    return ServerArgs(**vars(parser.parse_args(argv)))
