"""What one replica tells the others of itself, for the page of any of them. Small, and bounded by construction."""

from __future__ import annotations

import zlib

import msgspec

from sidecar.live.records import OldestWaiter, RefusalView, TenantView
from sidecar.telemetry.recent import Bucket, Overtakings
from sidecar.telemetry.tallies import Standing

MOST_TENANTS, MOST_REFUSALS, MOST_MESSAGE = 20, 20, 400
_MOST_BYTES = 2**20
"""Unpacked. A report of 5 tiers under load is 40 KiB so, and 3 to 5 KiB as it travels."""


class TierReport(msgspec.Struct, frozen=True):
    """One tier in this process. Buckets in which nothing happened are left out."""

    tier: str
    oldest: OldestWaiter | None
    recent: list[Bucket]
    overtaken_by: dict[str, Overtakings]


class Report(msgspec.Struct, frozen=True):
    """One process. `at_s` is its own calendar's; `generation` is its policy's, empty where it does not say.

    `observed` is None where nothing has been observed.
    """

    replica: str
    host: str
    at_s: float
    leases: int
    waiting: int
    tiers: list[TierReport]
    tenants: list[TenantView]
    refusals: list[RefusalView]
    generation: str = ""
    observed: Standing | None = None


class Unreadable(Exception):
    """A report of another version of this program, or none at all."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Report).decode


def pack(report: Report) -> bytes:
    """A report as it travels."""
    return zlib.compress(_encode(report), 1)


def unpack(packed: bytes) -> Report:
    """The report. Raises Unreadable."""
    try:
        return _decode(zlib.decompressobj().decompress(packed, _MOST_BYTES))
    except (zlib.error, msgspec.MsgspecError) as error:
        raise Unreadable(str(error)) from None
