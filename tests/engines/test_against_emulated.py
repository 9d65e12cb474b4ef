"""What we forward is accepted by each emulated engine, and means the order that was granted."""

from __future__ import annotations

import json
from itertools import pairwise

from sidecar.admission.forwarding import forwarded_body
from sidecar.apis import Api
from sidecar.engines import Dynamo, Engine, Sglang, TensorRtLlm, Vllm
from sidecar.engines.base import Carrier, Forward
from sidecar.payload.decode import decode
from sidecar.tools.emulator.config import EmulatorConfig
from sidecar.tools.emulator.dialects.base import Dialect as Emulated
from sidecar.tools.emulator.dialects.dynamo import DynamoDialect
from sidecar.tools.emulator.dialects.sglang import SglangDialect
from sidecar.tools.emulator.dialects.tensorrt_llm import TrtllmDialect
from sidecar.tools.emulator.dialects.vllm import VllmDialect
from sidecar.tools.emulator.request import read_ask
from sidecar.tools.step_model.queue import ORDERS, Key, Rank
from tests.support.each import each

ENGINES = {
    TensorRtLlm: TrtllmDialect,
    Vllm: VllmDialect,
    Sglang: SglangDialect,
    Dynamo: DynamoDialect,
}
WAYS = [
    (TensorRtLlm, None),
    *((engine, carrier) for engine in (Vllm, Sglang) for carrier in Carrier),
    (Dynamo, None),
]
# What the client sent: its own priorities, which must not reach the engine.
HINTS = b'"nvext":{"agent_hints":{"priority":99,"osl":3}},"priority":99'
BODIES = {
    Api.CHAT: b'{%b,"messages":[{"role":"user","content":"hi"}],"max_tokens":3}',
    Api.COMPLETIONS: b'{"prompt":"hi","max_tokens":3,%b}',
    Api.RESPONSES: b'{"input":"hi",%b}',
    Api.MESSAGES: b'{"messages":[{"role":"user","content":"hi"}],%b,"max_tokens":3}',
    Api.EMBEDDINGS: b'{"input":"hi",%b}',
}


def heard(engine: type[Engine], api: Api, body: bytes, forward: Forward) -> Rank:
    """The priority as the emulated engine reads it. Raises Refusal or InvalidField where it does not accept it."""
    emulated: Emulated = ENGINES[engine](EmulatorConfig(engine=engine, header_overrides=True))
    decoded = json.loads(forwarded_body(body, decode(api, body), forward))
    if engine is TensorRtLlm:
        decoded.pop("nvext", None)  # it knows no such field, from any client
    emulated.check(api, decoded)
    read_ask(api, decoded, "m")
    return emulated.rank(api, decoded, {name.decode(): value.decode() for name, value in forward.headers})


@each("api", list(BODIES))
@each(("engine", "carrier"), WAYS, ids=[f"{e.name}-{c and c.value}" for e, c in WAYS])
@each("levels", [1, 2, 5, 11])
def test_each_level_is_accepted_and_served_in_order(
    engine: type[Engine], carrier: Carrier | None, api: Api, levels: int
) -> None:
    spoken = engine(carrier)
    body = BODIES[api] % HINTS
    keys: list[Key] = []
    for level in range(levels):
        forward = spoken.forward(api, spoken.priority(level, levels))
        rank = heard(engine, api, body, forward)
        assert (rank.value is not None) == forward.is_sent
        keys.append(ORDERS[engine](rank, 100.0))
    if spoken.forward(api, 0).is_sent:
        assert all(better < worse for better, worse in pairwise(keys))
    else:
        assert len(set(keys)) == 1  # the engine hears nothing, and treats all alike
