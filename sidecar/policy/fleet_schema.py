"""Schema of the policy's `engines` and `models`, and of the engine list that a policy may name."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, model_validator

from sidecar.policy import fields as of
from sidecar.policy.capacity_schema import Capacity
from sidecar.policy.file_model import FileModel, key, nothing_means_defaults

SOURCES = ("static", "file", "dns", "mounted")
ONE_ENGINE = "[{name: a, url: http://a:8000}]"


class EngineEntry(FileModel):
    """One engine: an instance of the engine that the policy names."""

    name: of.EngineName = key(
        ..., "Its name, unique among the engines: in metrics, `sidecar engines` and `x-admission-engine`.", "a"
    )
    url: of.EngineUrl = key(..., "Its address, also with a base path.", "http://a:8000")
    capacity: Capacity | None = key(
        None, "What it holds at once. Default: `capacity` of `engines`.", {"tokens": "400k", "requests": 160}
    )
    prefill: of.Prefill | None = key(
        None, "Un-prefilled prompt tokens it may have at once. Default: `prefill` of `engines`.", "16k"
    )
    speed: of.Speed = key(
        1,  # replicas of one deployment are alike
        "Its speed against the other engines: of two that are as busy, one of 0.5 counts as twice as busy.",
        0.5,
    )


class DnsBody(FileModel):
    """A name whose records are the engines, such as that of a headless service in Kubernetes."""

    name: of.Service = key(
        ..., "A host and a port for its A and AAAA records, or the name of SRV records.", "vllm.default.svc:8000"
    )
    refresh: of.Period = key(
        "5s",  # the time to live that CoreDNS gives a service's records
        "How often the name is looked up.",
        "30s",
    )


class AffinityBody(FileModel):
    """How much a request is drawn to the engine that has computed its prefix before."""

    prefix: of.Flag = key(
        True,  # costs a hash for each 256 bytes of a prompt, and decides most of the prefix cache's hit rate
        "Whether hits of the engines' prefix caches are predicted from the prompt's bytes.",
    )
    weight: of.Weight = key(
        3,  # 2 loses more than a seventh of the hits of cache-aware routing on a real trace: benchmarks/fleet
        "How many waiting prompt tokens one predicted token outweighs. With 0 the caches are ignored.",
        1.5,
    )
    session: of.SessionSources = key(
        # The prompt's bytes show a hit. A session's name only claims one, and a false claim overfills an engine.
        [],
        "Headers, or `prompt_cache_key` of the body, that name a session: the engine that served it last is taken to "
        "have all of its prompt. For prompts whose beginning changes, or is not in the body. Default: none.",
        ["x-session-id", "prompt_cache_key"],
    )


class HealthBody(FileModel):
    """The probes that say whether an engine is there. A refused connection takes it out at once."""

    path: of.UrlPath | None = key(
        None,  # `/health` of SGLang generates a token, so its page is another: each engine's class has its own
        "The page. Any answer but 502, 503 and 504 is life. Default: the engine's own, `/health` for most.",
        "/health",
    )
    every: of.Period = key(
        "2s",  # a health page costs milliseconds
        "How often it is read. An engine that is down is asked more often.",
    )
    fail: of.PositiveCount = key(
        3,  # a busy engine may be slow to answer once; six seconds without a sign of life are another matter
        "Failures in a row, while nothing else comes from the engine, that take it out.",
    )
    rise: of.PositiveCount = key(
        2,  # an engine that crashes at its first request answers one probe before it
        "Answers in a row that bring it back.",
    )


class ReplayBody(FileModel):
    """Replays of requests whose engine broke, elsewhere. A request is never replayed after its answer's first byte."""

    before_first_byte: of.Replays = key(
        1,  # unseen by the client, and one engine more
        "How often one request is replayed: 1, or 0 for never. A request that broke two engines gets a 502.",
    )
    budget: of.Share = key(
        "10%",  # a replay computes a prompt twice: engines that all break must not get twice the work as well
        "The part of all admissions that may be replays. Ten a minute are always allowed.",
    )


class EnginesBody(FileModel):
    """Several engines that share one pool. Each request enters the one that suits it best, when that one has room.

    One of `static`, `file`, `dns` and `mounted` says where they are. The pool's capacity is the sum of theirs.
    """

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [source]} for source in SOURCES]})

    static: Annotated[list[EngineEntry], of.listed(ONE_ENGINE)] | None = key(
        None, "The engines, one by one.", [{"name": "a", "url": "http://a:8000"}]
    )
    file: of.EngineListAt | None = key(
        None, "A file that lists them, relative to this one. It is followed while the sidecar runs.", "engines.yaml"
    )
    dns: DnsBody | None = key(None, "A name whose records are the engines.", {"name": "vllm.default.svc:8000"})
    mounted: of.Mounted | None = key(
        None, "Each process that mounts the middleware is an engine, which only its own requests enter.", True
    )
    capacity: Capacity = key(
        {"from": "engine"},  # engines know their size, and an engine that is started with another needs no change here
        "What each engine holds at once that writes nothing of its own.",
        {"tokens": "400k", "requests": 160},
    )
    prefill: of.Prefill = key(
        # What engines compute in one step: vLLM (max_num_batched_tokens), SGLang (chunked_prefill_size) and
        # TensorRT-LLM (max_num_tokens) have 8192 as their default on large GPUs. With less, an engine idles between two
        # prompts; with more, prompts queue inside it, bound to it, in its order. Without a bound, an engine with room
        # in its KV cache takes every prompt when it comes: that is binding on arrival, which claims are there to avoid.
        "8k",
        "Un-prefilled prompt tokens, sent and without a first byte, that an engine may have at once, or `unbounded`. "
        "A larger prompt enters an engine that has none.",
        "16k",
    )
    affinity: Annotated[AffinityBody, BeforeValidator(nothing_means_defaults)] = key(
        {}, "How much a request is drawn to the engine that has its prefix."
    )
    health: Annotated[HealthBody, BeforeValidator(nothing_means_defaults)] = key({}, "The probes of each engine.")
    slow_start: of.Duration = key(
        "60s",  # caches are empty, and the first requests of each shape compile kernels
        "How long an engine that comes back is given its capacity in ten steps. `0s`: all at once.",
    )
    replay: Annotated[ReplayBody, BeforeValidator(nothing_means_defaults)] = key(
        {}, "Replays of requests whose engine broke."
    )
    drain_timeout: of.PositiveDuration = key(
        "10m",  # 12,000 tokens at 20 a second, so longer than almost any answer
        "How long a drain waits for the engine's last request. None is cut: an answer that is longer goes on.",
    )

    @model_validator(mode="after")
    def _has_one_source(self) -> EnginesBody:
        written = [name for name in SOURCES if getattr(self, name) is not None]
        if not written:
            raise ValueError(
                f"does not say where the engines are; write static, file, dns or mounted, such as static: {ONE_ENGINE}"
            )
        if len(written) > 1:
            raise ValueError(f"{' and '.join(written)} are both here; keep one of them")
        return self


class ModelBody(FileModel):
    """One model: a pool of its own, with the tiers and tenants of all."""

    engines: of.EngineNames | None = key(
        None, "The names of its engines. Required where there are several models. Default: all.", ["a", "b"]
    )
    aliases: of.ModelNames = key(
        [],  # a request goes to the engine with the name that it came with
        "Other names that clients send for it, and that its engines know, such as LoRA adapters. Default: none.",
        ["llama", "my-lora"],
    )


class EngineListFile(FileModel):
    """The engines of a pool, in a file that other programs write. An empty list takes all engines out."""

    engines: Annotated[list[EngineEntry], of.a_list(ONE_ENGINE)] = key(
        ..., "The engines, one by one.", [{"name": "a", "url": "http://a:8000"}]
    )
